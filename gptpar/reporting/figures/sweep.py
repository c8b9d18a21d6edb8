"""The picture of a sweep: a bar for each configuration that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptpar.reporting.figures import style


@dataclass(frozen=True)
class Bar:
    """The bar of a configuration.

    Attributes:
        name: text on the left.
        tokens_per_s: tokens per second of all processes.
        note: text at the bar's end.
        expected: tokens/s that the plan has predicted; ``None`` without a plan.
    """

    name: str
    tokens_per_s: float
    note: str
    expected: float | None = None


def draw_sweep(bars: Sequence[Bar], path: Path, title: str) -> None:
    """Write the PNG: the bars from top to bottom, with a mark for each prediction."""
    figure = style.new_figure(11, 1.6 + 0.34 * len(bars))
    axes = figure.subplots()
    places = range(len(bars))
    axes.barh(places, [bar.tokens_per_s for bar in bars], color=style.BLUE, height=0.7)
    axes.set_yticks(places, [bar.name for bar in bars])
    for place, bar in enumerate(bars):
        axes.annotate(bar.note, (bar.tokens_per_s, place), (4, 0), textcoords="offset points", va="center")
    expected = [(bar.expected, place) for place, bar in enumerate(bars) if bar.expected is not None]
    if expected:
        axes.plot(*zip(*expected, strict=True), "D", color=style.ORANGE, label="expected by gptpar plan")
        figure.legend(frameon=False, loc="outside lower right")
    axes.invert_yaxis()
    axes.margins(x=0.18)
    style.with_separators(axes.xaxis)
    style.open_frame(axes)
    axes.set(xlabel="tokens/s of all processes", title=title)
    style.save(figure, path)
