"""Whole runs of the tiny model in this process, and what they leave in their folders."""

import signal
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import find_checkpoints, read_tensors
from gptpar.cli.pretrain import pretrain, start_checks
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.reporting.metrics_file import read_metrics
from tests.helpers import TINY

FEW = f"{TINY} --train-iters 8 --log-interval 1"


def run(folder: Path, flags: str = "", start: str = FEW) -> signal.Signals | None:
    """Eight steps unless the flags say otherwise; returns the signal that stopped it."""
    words = f"{start} --save {folder} {flags}".split()
    config, derived = resolve(parse_flags(words), 1, more=start_checks)
    return pretrain(config, derived, ())


def iterations(folder: Path) -> list[int]:
    """Those of the checkpoints, in order."""
    return sorted(number for number, _ in find_checkpoints(folder))


def column(folder: Path, name: str) -> dict[int, Any]:
    """Iteration -> this number of its record in metrics.jsonl."""
    return {one["iteration"]: one[name] for one in read_metrics(folder / "metrics.jsonl") if name in one}


def losses(folder: Path) -> dict[int, float]:
    return column(folder, "lm_loss")


def assert_same_tensors(one: Path, other: Path) -> None:
    """Two checkpoints have the same bits."""
    ours, theirs = read_tensors(one), read_tensors(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
