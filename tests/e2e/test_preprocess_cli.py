"""The tools as a user runs them: same bytes for any number of workers, and nothing left behind when stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.data.tokenizer.vocabularies import SAMPLE, small_vocabulary, write_files

ROOT = Path(__file__).parents[2]
MEGABYTE = 1 << 20


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{name}.py"), *arguments]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command(name, *arguments), capture_output=True, text=True, env=environment)


def write_corpus(path: Path, documents: int) -> str:
    lines = (json.dumps({"text": f"document {i} " * (i % 900)}) for i in range(documents))
    path.write_text("\n".join(lines))
    return str(path)


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c.jsonl", 1000)
    for workers in ("1", "3"):
        done = run(
            "preprocess_data", "--input", corpus, "--output-prefix", str(tmp_path / workers), "--append-eod",
            "--tokenizer-type", "ByteLevelTokenizer", "--workers", workers,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1,000 documents, ")
    for end in ("bin", "idx"):
        one, three = ((tmp_path / f"{workers}_text_document.{end}").read_bytes() for workers in "13")
        assert one == three and len(one) > 10_000


def test_the_four_tools_together(tmp_path: Path):
    corpus, model, prefix = str(tmp_path / "c.jsonl"), str(tmp_path / "t.model"), str(tmp_path / "p")
    steps = [
        ("make_corpus", "--output", corpus, "--max-megabytes", "1"),
        ("train_tokenizer", "--input", corpus, "--vocab-size", "600", "--output", model),
        ("preprocess_data", "--input", corpus, "--output-prefix", prefix, "--append-eod", "--workers", "1",
         "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model),
        ("merge_datasets", "--input", f"{prefix}_text_document", "--output-prefix", str(tmp_path / "all")),
    ]  # fmt: skip
    for step in steps:
        done = run(*step)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for end in ("bin", "idx"):
        assert (tmp_path / f"all.{end}").read_bytes() == (tmp_path / f"p_text_document.{end}").read_bytes()


def peak_memory(folder: Path, corpus: Path, workers: str) -> float:
    """MB that preprocessing needs at most."""
    program = (
        "import sys; from gptpar.__main__ import main; assert not main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "preprocess", "--input", str(corpus), "--output-prefix", str(folder / "p"),
         "--append-eod", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "encoder.json"),
         "--merge-file", str(folder / "vocab.bpe"), "--workers", workers],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1]) / 1024


@pytest.mark.parametrize(("name", "workers"), [("many.jsonl", "2"), ("long.jsonl", "1"), ("long.txt", "1")])
def test_memory_does_not_grow_with_the_input(name: str, workers: str, tmp_path: Path):
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


def test_an_error_in_a_worker_is_one_sentence(tmp_path: Path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "a"}\n{"txt": "b"}\n')
    done = run(
        "preprocess_data", "--input", str(corpus), "--output-prefix", str(tmp_path / "p"),
        "--tokenizer-type", "ByteLevelTokenizer", "--workers", "2",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f'error: {corpus}, line 2: no key "text"; there are: txt\n'
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c.jsonl", 10)
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ("--input", corpus, "--output-prefix", str(tmp_path / "p"), "--workers", "1")
    done = subprocess.run(
        command("preprocess_data", *arguments, "--tokenizer-type", "ByteLevelTokenizer"),
        stdout=writer, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "p_text_document.idx").is_file()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for the workers in /proc")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_nothing(signum: int, status: int, tmp_path: Path):
    fifo = tmp_path / "c.jsonl"
    write_corpus(fifo, 6_000)
    process = subprocess.Popen(
        command("preprocess_data", "--input", str(fifo), "--output-prefix", str(tmp_path / "p"), "--workers", "2",
                "--tokenizer-type", "ByteLevelTokenizer"),
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
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
