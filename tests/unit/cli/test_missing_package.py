"""Without torch, commands, scripts and names answer with one sentence: what is missing, and what installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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


@pytest.mark.parametrize("words", ["--help", "make-corpus --help"])
def test_what_needs_no_torch_works(words: str) -> None:
    assert "usage: " in answer("from gptpar.cli import main; sys.exit(main())", *words.split()).stdout
