"""The picture of a plan: the memory of each stage beside that of a GPU, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptpar.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Intervals = Sequence[tuple[float, float]]
"""Begin and end in ms."""


@dataclass(frozen=True)
class ScheduleBars:
    """The times of each stage's forward and backward passes.

    Attributes:
        forward: for each stage, the forward passes of micro-batches.
        backward: for each stage, the backward passes.
        num_micro_batches: number of micro-batches that are shown.
    """

    forward: Sequence[Intervals]
    backward: Sequence[Intervals]
    num_micro_batches: int


def draw_plan(
    path: Path, title: str, memory: Mapping[str, Sequence[float]], capacity: float, schedule: ScheduleBars | None
) -> None:
    """Write the PNG.

    Args:
        memory: part -> GiB on a GPU of each stage.
        capacity: GiB that a GPU has.
        schedule: ``None`` without a pipeline.
    """
    figure = style.new_figure(13, 4.5 if schedule is None else 8)
    axes = figure.subplots(1 if schedule is None else 2, 1, squeeze=False)[:, 0]
    _draw_memory(axes[0], memory, capacity)
    if schedule is not None:
        _draw_schedule(axes[1], schedule)
    figure.suptitle(title, fontweight="bold")
    style.save(figure, path)


def _draw_memory(axes: Axes, memory: Mapping[str, Sequence[float]], capacity: float) -> None:
    left = [0.0] * len(next(iter(memory.values())))
    for (part, widths), color in zip(memory.items(), style.STACKED, strict=True):
        axes.barh(range(len(left)), widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(capacity, color=style.LINES, ls="--", label="a GPU has")
    axes.set_xlabel("GiB on each of a stage's GPUs")
    style.rows_downwards(axes, "stage")
    axes.legend(ncols=len(memory) + 1, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_schedule(axes: Axes, schedule: ScheduleBars) -> None:
    for stages, color in ((schedule.forward, style.BLUE), (schedule.backward, style.ORANGE)):
        for stage, intervals in enumerate(stages):
            style.time_bars(axes, stage, intervals, color, edge=0.4)
    axes.set_xlabel(f"ms: forward blue, backward orange, {schedule.num_micro_batches} micro-batches")
    style.rows_downwards(axes, "stage")
