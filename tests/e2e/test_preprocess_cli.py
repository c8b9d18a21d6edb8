"""The tools as a user runs them: same bytes for any number of workers, and nothing left behind when stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT, said_by_program
from tests.unit.data.tokenizer.vocabularies import SAMPLE, small_vocabulary, write_files

MEGABYTE = 1 << 20
FRESH = os.environ | {"PYTHONPATH": str(ROOT)}


def tool(name: str, *arguments: object, expect: int = 0) -> str:
    """What a program of tools/ prints."""
    return said_by_program(ROOT / "tools" / f"{name}.py", *arguments, expect=expect)


def preprocessing(corpus: Path, prefix: Path, workers: int) -> list[str]:
    """The words that tokenize bytes in a new interpreter."""
    words = f"--input {corpus} --output-prefix {prefix} --workers {workers} --tokenizer-type ByteLevelTokenizer"
    return [sys.executable, str(ROOT / "tools/preprocess_data.py"), *words.split()]


def write_corpus(path: Path, documents: int) -> None:
    lines = (json.dumps({"text": f"document {i} " * (i % 900)}) for i in range(documents))
    path.write_text("\n".join(lines))


def test_the_four_tools_together(tmp_path: Path) -> None:
    """The bytes are the same for any number of workers, and after merging."""
    corpus, model = tmp_path / "c.jsonl", tmp_path / "t.model"
    tool("make_corpus", "--output", corpus, "--max-megabytes", 1)
    tool("train_tokenizer", "--input", corpus, "--vocab-size", 600, "--output", model)
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--append-eod")
    for workers in (1, 3):
        prefix = tmp_path / f"by{workers}"
        said = tool("preprocess_data", "--input", corpus, "--output-prefix", prefix, "--workers", workers, *tokenizer)
        assert re.match(r"[\d,]+ documents, ", said)
    tool("merge_datasets", "--input", tmp_path / "by1_text_document", "--output-prefix", tmp_path / "all")
    for end in ("bin", "idx"):
        one = (tmp_path / f"by1_text_document.{end}").read_bytes()
        assert len(one) > 1000 and one == (tmp_path / f"by3_text_document.{end}").read_bytes()
        assert one == (tmp_path / f"all.{end}").read_bytes()


def peak_memory(folder: Path, corpus: Path, workers: str) -> float:
    """MB that preprocessing needs at most."""
    program = (
        "import sys; from gptpar.__main__ import main; assert not main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    words = f"--input {corpus} --output-prefix {folder}/p --workers {workers} --append-eod "
    words += f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/encoder.json --merge-file {folder}/vocab.bpe"
    started = [sys.executable, "-c", program, "preprocess", *words.split()]
    done = subprocess.run(started, capture_output=True, text=True, env=FRESH, check=True)
    return int(done.stdout.splitlines()[-1]) / 1024


@pytest.mark.parametrize(("name", "workers"), [("many.jsonl", "2"), ("long.jsonl", "1"), ("long.txt", "1")])
def test_memory_does_not_grow_with_the_input(name: str, workers: str, tmp_path: Path) -> None:
    write_files(tmp_path, *small_vocabulary(25))
    corpus, peaks = tmp_path / name, []
    text = SAMPLE.replace("\n", " ")
    for megabytes in (16, 40):
        copies = megabytes * MEGABYTE // len(text)
        if name == "many.jsonl":
            corpus.write_text((json.dumps({"text": text}) + "\n") * copies)
        else:
            whole = text * copies
            corpus.write_text(json.dumps({"text": whole}) if name == "long.jsonl" else whole)
        peaks.append(peak_memory(tmp_path, corpus, workers))
    assert peaks[1] < peaks[0] + 12, peaks


def test_an_error_in_a_worker_is_one_sentence(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "a"}\n{"txt": "b"}\n')
    words = f"--input {corpus} --output-prefix {tmp_path}/p --tokenizer-type ByteLevelTokenizer --workers 2"
    said = tool("preprocess_data", *words.split(), expect=1)
    assert said == f'error: {corpus}, line 2: no key "text"; there are: txt\n'
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 10)
    reader, writer = os.pipe()
    os.close(reader)
    words = preprocessing(tmp_path / "c.jsonl", tmp_path / "p", 1)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, env=FRESH)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "p_text_document.idx").is_file()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for the workers in /proc")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_nothing(signum: int, status: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 6_000)
    words = preprocessing(tmp_path / "c.jsonl", tmp_path / "p", 2)
    process = subprocess.Popen(words, env=FRESH, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(lambda: sum(path.stat().st_size for path in tmp_path.glob("*.tmp")) > 0)
    assert len(session(process.pid)) >= 3
    os.kill(process.pid, signum)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert b"Traceback" not in errors
    wait_for(lambda: not session(process.pid))
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp")}
    assert left == {"c.jsonl"}
    if signum != signal.SIGKILL:
        assert not list(tmp_path.glob("*.tmp"))


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def session(leader: int) -> list[int]:
    """Live processes of the session that `leader` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(folder.name))
    return found
