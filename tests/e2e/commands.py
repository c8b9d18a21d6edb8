"""Commands as a user types them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gptpar.cli import main
from tests.forked import FORKED
from tests.helpers import TINY

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 300.0


def command(flags: str, verb: str = "pretrain") -> list[str]:
    return [sys.executable, "-m", "gptpar", verb, *(TINY if verb == "pretrain" else "").split(), *flags.split()]


def gptpar(flags: str, verb: str = "pretrain", expect: int = 0) -> str:
    """What a command prints; see :func:`said_by`."""
    return said_by(command(flags, verb)[3:], expect)


def said_by(words: Sequence[str], expect: int = 0) -> str:
    """What ``gptpar WORDS`` prints, on stdout and then on stderr.

    Its process is a fork, which saves its start-up; workers that it starts are ordinary ones.

    Args:
        expect: the exit code that it must have.
    """
    with tempfile.TemporaryDirectory(prefix="gptpar-command-") as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        process = FORKED.Process(target=_run, args=(words, files, ENVIRONMENT))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        said = "".join(file.read_text() for file in files)
    assert process.exitcode == expect, said
    return said


def _run(words: Sequence[str], files: Sequence[Path], environment: dict[str, str]) -> None:
    """In the child: be ``python -m gptpar WORDS`` in the environment of commands."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # the variable has been read already
    try:
        sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()


def stepping(words: list[str], taken: int) -> subprocess.Popen[str]:
    """A run in a process group of its own after so many steps; what it prints from then on is in its ``stdout``."""
    process = subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if f"iteration {taken:8d}/" in line:
            break
    return process


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["lm_loss"] for line in lines]


def children(pid: int) -> list[int]:
    """The live child processes of a process, as Linux lists them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())
