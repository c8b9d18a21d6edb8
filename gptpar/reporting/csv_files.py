"""Writes the files of DeepSpeed's CSV monitor: one file for each curve, with two columns, samples and value.

A file is named after its curve, ``Train/Samples/lr`` -> ``Train_Samples_lr.csv``. The header of its second column is
the last word of the curve. Rows have the line ends of Python's csv module. Source: deepspeed/monitor/csv_monitor.py,
DeepSpeed 0.19.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from gptpar.reporting.record_file import RecordFile
from gptpar.system.files import atomic_output, open_regular

LOSS_SCALE = "Train/Samples/loss_scale"


class CurvePoint(Protocol):
    """The numbers of one step that DeepSpeed's monitors draw."""

    @property
    def consumed_samples(self) -> int: ...
    @property
    def lm_loss(self) -> float | None: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def loss_scale(self) -> float: ...


CURVES: dict[str, Callable[[CurvePoint], float | None]] = {
    "Train/Samples/train_loss": lambda record: record.lm_loss,
    "Train/Samples/lr": lambda record: record.learning_rate,
    LOSS_SCALE: lambda record: record.loss_scale,
}
"""Curve -> the function that takes its value from a step's record."""


def curves_of(point: CurvePoint, *, with_loss_scale: bool) -> dict[str, float]:
    """Curve -> its value at a step; a curve without a value is left out."""
    values = {name: value(point) for name, value in CURVES.items() if with_loss_scale or name != LOSS_SCALE}
    return {name: value for name, value in values.items() if value is not None}


def open_curve(folder: Path, name: str, resume_samples: int = 0) -> RecordFile:
    """Open the file of a curve, or make it.

    Args:
        resume_samples: number of samples consumed by the state that a run goes on from; later rows are dropped.
    """
    path = folder / f"{name.replace('/', '_')}.csv"
    prepare = partial(_cut_after, path, resume_samples) if resume_samples else None
    return RecordFile(path, prepare=prepare, header=row("step", name.rpartition("/")[2]))


def row(samples: int | str, value: float | str | None) -> bytes:
    """One row of a CSV file, with its line end."""
    text = io.StringIO()
    csv.writer(text).writerow([samples, value])
    return text.getvalue().encode()


def _cut_after(path: Path, samples: int) -> None:
    """Drop the rows of later samples, atomically; an incomplete last row, left by a crash, is dropped, too."""
    if not path.is_file():
        return
    with open_regular(path) as old, atomic_output(path, path.with_name(path.name + ".tmp")) as new:
        for line in old:
            step = line.partition(b",")[0]
            if line.endswith(b"\n") and not (step.isdigit() and int(step) > samples):
                new.write(line)
