"""The picture of a part of a trace: lanes of the GPU, of transfers, of the CPU optimizer and of the loop's waits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptpar.reporting.figures import style
from gptpar.reporting.trace import Interval
from tools.trace_lanes import ADAM, GPU, NCCL, TO_DEVICE, TO_HOST, WAITS, Timeline, TraceEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {GPU: style.GREEN, NCCL: style.ORANGE, TO_HOST: style.BLUE, TO_DEVICE: style.PURPLE, WAITS: style.IDLE}
NO_LAYER_COLOR = style.RED
LETTER_WIDTH = 0.007  # of one letter, as a fraction of the picture's width

Phase = tuple[float, float, str]
"""(begin, end, name) of a phase, which is written above the lanes; ms."""


def depth_of(unit: str) -> int | None:
    """A layer's number; ``None`` for embeddings and the final norm."""
    number = re.fullmatch(r"layers\.(\d+)", unit)
    return int(number[1]) if number else None


def draw_trace(
    part: Timeline, span: Interval, path: Path, title: str, phases: Sequence[tuple[float, float, str]]
) -> None:
    """Write the PNG.

    Args:
        part: the events in the window ``span`` (ms).
        phases: written above the lanes.
    """
    figure = style.new_figure(13, 3.6)
    axes = figure.subplots()
    width = span[1] - span[0]
    for row, (lane, events) in enumerate(part.lanes.items()):
        colors = _adam_colors(events) if lane == ADAM else COLORS[lane]
        # An edge would hide kernels, of which thousands lie side by side.
        edge = 0.5 if lane == ADAM else 0.0
        style.time_bars(axes, row, [(e.start, e.stop) for e in events], colors, edge=edge)
        axes.annotate(
            f"{part.busy(lane):.1f} ms", (1.005, row), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
        if lane == ADAM:
            _write_units(axes, events, row, width)
    for start, stop, name in phases:
        for edge_ms in (start, stop):
            axes.axvline(edge_ms, color=style.LINES, lw=0.8, ls=":")
        axes.text((start + stop) / 2, -0.62, name, ha="center", va="center", fontsize=10)
    axes.set_yticks(range(len(part.lanes)), list(part.lanes))
    axes.set(xlim=span, ylim=(len(part.lanes) - 0.5, -0.9 if phases else -0.5), xlabel="ms after the first kernel")
    axes.tick_params(axis="y", length=0)
    style.open_frame(axes, "left")
    if title:
        axes.set_title(title, fontweight="bold", loc="left")
    style.save(figure, path)


def _adam_colors(events: Sequence[TraceEvent]) -> list[Any]:
    """Colours of CPU Adam's events: shallow layers light, deep ones dark, other units red."""
    from matplotlib import colormaps

    depths = [depth_of(e.name) for e in events]
    deepest = max((d for d in depths if d is not None), default=0) or 1
    return [NO_LAYER_COLOR if d is None else colormaps["YlGnBu"](0.25 + 0.7 * d / deepest) for d in depths]


def _write_units(axes: Axes, events: Sequence[TraceEvent], row: int, width: float) -> None:
    """Write the names of CPU Adam's units if there is room; of a layer, its number alone."""
    deepest = max((depth_of(e.name) or 0 for e in events), default=0)
    for unit, pieces in groupby(events, key=lambda e: e.name):
        together = list(pieces)
        depth = depth_of(unit)
        text = unit if depth is None else str(depth)
        start, stop = together[0].start, together[-1].stop
        if stop - start >= LETTER_WIDTH * width * len(text):
            color = "black" if depth is not None and depth < 0.6 * deepest else "white"
            over_gaps = {"facecolor": NO_LAYER_COLOR, "edgecolor": "none", "pad": 1.0} if depth is None else None
            axes.text((start + stop) / 2, row, text, ha="center", va="center", fontsize=8, color=color, bbox=over_gaps)
