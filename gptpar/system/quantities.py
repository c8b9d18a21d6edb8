"""Reads counts and sizes as people write them: ``1.5B`` tokens, ``80GiB`` of memory."""

from __future__ import annotations

import argparse
from decimal import Decimal, InvalidOperation

THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTES = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
MAX_COUNT = 2**63 - 1
"""The largest whole number that torch and numpy can hold."""


def read_count(text: str, most: int = MAX_COUNT) -> int:
    """A whole number from 0 to ``most``, which may be written as 2.4B or 5e8.

    Raises:
        ValueError: it is no such number; the message, a part of a sentence, says why.
    """
    scale = THOUSANDS.get(text[-1:].upper(), 1)
    number = _number(text if scale == 1 else text[:-1])
    if number is None:
        raise ValueError(f"{text[:40]!r} is not a number, with K, M, B or T behind it if need be")
    if not 0 <= number <= most or number * scale > most:
        raise ValueError(f"{text[:40]} is not between 0 and {most:,}")
    if number * scale % 1 != 0:
        raise ValueError(f"{text[:40]} is not a whole number")
    return int(number * scale)


def count(text: str) -> int:
    """An argparse type: a whole number, such as 512K."""
    try:
        return read_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_bytes(text: str, unit: str = "B") -> int:
    """Bytes: ``80GiB``, ``1.5 TB``, or a number alone in ``unit``; fractions of a byte are dropped.

    Raises:
        ValueError: it is no size; the message, a part of a sentence, says why.
    """
    digits = text.strip().rstrip("BIKMGTbikmgt").rstrip()
    name = text.strip()[len(digits) :].strip() or unit
    number, scale = _number(digits), BYTES.get(name.upper())
    if number is None or scale is None or abs(number) > MAX_COUNT:
        raise ValueError(f"{text[:40]!r} is not a size such as 80GiB, 80GB or 1.5TiB")
    return int(number * scale)


def positive_bytes(text: str, unit: str = "B") -> int:
    """An argparse type: a size above 0; a number alone is in ``unit``."""
    try:
        size = read_bytes(text, unit)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return size


def positive_gib(text: str) -> float:
    """An argparse type: a size above 0, returned in GiB; a number without a unit is in GiB."""
    return positive_bytes(text, "GiB") / 2**30


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
