"""Commands as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import TINY

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(flags: str, verb: str = "pretrain") -> list[str]:
    return [sys.executable, "-m", "gptpar", verb, *(TINY if verb == "pretrain" else "").split(), *flags.split()]


def gptpar(flags: str, verb: str = "pretrain", expect: int = 0) -> str:
    done = subprocess.run(command(flags, verb), env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


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
