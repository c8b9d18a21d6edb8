"""The text layout of the start banner: titled sections of aligned ``name value  (reason)`` rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 100
"""Columns of the banner."""
_INDENT = 2


@dataclass(frozen=True)
class Row:
    """One line of the banner; ``reason`` says where a derived value comes from."""

    name: str
    value: str
    reason: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    rows: Sequence[Row]


def banner(sections: Sequence[Section]) -> str:
    """All sections as text, in lines of at most 100 characters; all values start in the same column.

    Sections without rows are left out. Text that does not fit in a line continues under its value.
    """
    shown = [section for section in sections if section.rows]
    column = _INDENT + 2 + max((len(row.name) for section in shown for row in section.rows), default=0)
    return "\n".join(line for section in shown for line in _section_lines(section, column))


def _section_lines(section: Section, column: int) -> list[str]:
    title = f"--- {section.title} "
    lines = [title.ljust(WIDTH, "-")]
    for row in section.rows:
        text = f"{row.value}  ({row.reason})" if row.reason else row.value
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=" " * _INDENT + row.name.ljust(column - _INDENT), subsequent_indent=" " * column
        )
    return lines


def format_bytes(count: float) -> str:
    """``1.50 GiB``: bytes in the largest binary unit that leaves at least 1."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    exponent = 0
    while abs(count) >= 1024 and exponent < len(units) - 1:
        count /= 1024
        exponent += 1
    return f"{count:.2f} {units[exponent]}" if exponent else f"{count:.0f} B"


def in_gib(count: float, digits: int | None = None) -> float:
    """Bytes as GiB, rounded to ``digits`` if given."""
    return count / 2**30 if digits is None else round(count / 2**30, digits)


def format_count(count: float) -> str:
    """``1.31 B``: a count of parameters or tokens in thousands, millions, billions or trillions."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text, with ranges for consecutive ones: ``0-2, 7-9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
