"""DeepSpeed's small functions of texts."""

from __future__ import annotations

from typing import Any

from gptpar.errors import ArgumentError


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as a program writes it: ``base(1, 'two', three=3)``."""
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(given)})"


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of a text such as ``0,2-4,6``, which ascend.

    Raises:
        ArgumentError: they do not ascend, or there is something else in the text.
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ArgumentError(f"{part!r} in {range_str!r} is neither a number nor two of them with a dash between.")
        some = range(int(first), int(last or first) + 1)
        if not some or (numbers and some[0] <= numbers[-1]):
            raise ArgumentError(f"{part!r} in {range_str!r}: the numbers have to ascend.")
        numbers += some
    return numbers
