"""The words around the verbs, verbs that start without torch, and what is said where torch is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptpar.cli import main, usage


@pytest.mark.parametrize(("words", "status"), [("", 2), ("help", 0), ("--help", 0), ("-h", 0)])
def test_the_verbs_are_listed(words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == status
    assert capsys.readouterr().out == usage() + "\n"


def test_help_of_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "merge"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: gptpar merge ")
    assert main(["help", "marge"]) == 2
    assert "there is no verb 'marge'; did you mean merge?" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_the_usage_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "gptpar"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# --- Verbs that compute no tensor start without torch, which takes seconds to import --------------------------------


ROOT = Path(__file__).parents[3]
LIGHT = ("launch", "preprocess", "merge", "train_tokenizer", "make_corpus", "completion", "summary", "plot")
PROGRAM = """
import importlib, sys
for verb in sys.argv[1:]:
    importlib.import_module(f"gptpar.cli.{verb}")
    if "torch" in sys.modules:
        raise SystemExit(f"{verb} imports torch")
"""


@pytest.mark.slow
def test_verbs_without_tensors_are_imported_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- Without torch, commands, scripts and names answer with one sentence: what is missing, and what -----------------


WITHOUT = "import sys; sys.modules['torch'] = None; "
SENTENCE = f"gptpar needs the package torch, which is not installed in {sys.prefix}: run pip install torch."
PRETRAIN = "pretrain --preset tiny --mock-data --vocab-size 100 --micro-batch-size 1 --train-iters 1 --lr 1e-3"


def answer(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "words",
    [PRETRAIN, pytest.param("pretrain --help", marks=pytest.mark.slow), pytest.param("doctor", marks=pytest.mark.slow)],
)
def test_a_command(words: str) -> None:
    program = "import runpy; sys.argv[0] = 'gptpar'; runpy.run_module('gptpar', run_name='__main__')"
    done = answer(program, *words.split())
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {SENTENCE}\n")


def test_what_needs_no_torch_works() -> None:
    assert "usage: " in answer("from gptpar.cli import main; sys.exit(main())", "make-corpus", "--help").stdout
