"""The common style of all pictures: colours, figures, axes, time lines, and saving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, CYAN, GREEN, ORANGE = "#1f5fa8", "#4aa8c0", "#2a9d6f", "#e08e1b"
RED, PURPLE, BROWN, SLATE = "#d1495b", "#7b4fa3", "#8c6d4f", "#5c677d"
LINES, GRID, IDLE = "#555555", "#e6e6e6", "#9aa1ab"
"""Colours of reference lines, of the grid, and of idle time."""
DIFFERENT = (BLUE, RED, GREEN, ORANGE, PURPLE, CYAN, BROWN, SLATE)
"""Colours of several things of one kind, in an order in which neighbours differ in a small legend."""
STACKED = (BLUE, CYAN, GREEN, ORANGE, RED, BROWN)
"""Colours of the parts of a bar."""


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


def open_frame(axes: Axes, *sides: str) -> None:
    """Remove the frame's lines at the top and on the right, and those on further ``sides``."""
    axes.spines[["top", "right", *sides]].set_visible(False)


def with_separators(axis: Any) -> None:
    """Write ticks as ``1,000``."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def rows_downwards(axes: Axes, label: str) -> None:
    """Number rows 0, 1, 2 from the top."""
    from matplotlib.ticker import MaxNLocator

    axes.invert_yaxis()
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def time_bars(
    axes: Axes, row: int, intervals: Iterable[tuple[float, float]], colors: str | Sequence[Any], *, edge: float = 0.0
) -> None:
    """Draw bars from begin to end in one row of a time line.

    Args:
        colors: one colour, or one for each interval.
        edge: width of a white line around each bar, in points.
    """
    bars = [(begin, end - begin) for begin, end in intervals]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colors, edgecolors="white", linewidth=edge)


def save(figure: Figure, path: Path) -> None:
    """Write the PNG; folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
