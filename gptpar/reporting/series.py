"""Reads the values of one key from the lines of a ``metrics.jsonl``, and sums up its losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gptpar.errors import GptparError

MAX_FLOAT = 3.4e38
"""A run's numbers are fp32; larger ones are damage, and no curve could be drawn or averaged with them."""


def last_tenth(losses: Sequence[float]) -> float:
    """Mean of the last tenth of a run's losses (at least one)."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def series(file: Path, objects: Iterable[dict[str, Any]], key: str) -> list[float | None]:
    """The values of a key; ``None`` for a line without it, or with a value that 32 bits cannot hold.

    Raises:
        GptparError: a value is no number; it names the iteration.
    """
    return [_number(file, line, key) for line in objects]


def _number(file: Path, line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        number = None
    if number is None:
        raise GptparError(
            f"{file}: {key} of iteration {str(line['iteration'])[:20]} is {repr(value)[:60]}, not a number: repair or "
            "delete the line"
        )
    return number if abs(number) <= MAX_FLOAT else None  # also of NaN
