"""Divides a corpus into training, validation and test ranges, by either of Megatron's two rules."""

from __future__ import annotations

import math
import re
from typing import Literal

from gptpar.errors import DataError

SplitRule = Literal["mcore", "legacy"]
SequenceRange = tuple[int, int]


def parse_split(
    text: str, num_sequences: int, rule: SplitRule = "mcore"
) -> tuple[SequenceRange | None, SequenceRange | None, SequenceRange | None]:
    """Sequence ranges [start, end) of train, valid and test for a text such as "969,30,1".

    The two rules differ by a few sequences in small corpora: "mcore" rounds each boundary. "legacy" (Megatron before
    megatron-core, Megatron-DeepSpeed) rounds each part, and shifts every boundary but the first by the surplus.

    Returns:
        Three ranges; None for a part whose number is 0. A "mcore" range can be empty (start == end).

    Raises:
        DataError: the text is not one to three numbers with a positive sum.
    """
    fractions = _fractions(text)
    train, valid, test = (_mcore if rule == "mcore" else _legacy)(fractions, num_sequences)
    return train, valid, test


def normalized_split(text: str) -> tuple[float, ...]:
    """The fractions of training, validation and test in a split such as "969,30,1", rounded to nine digits.

    Raises:
        DataError: see ``parse_split``.
    """
    return tuple(round(fraction, 9) for fraction in _fractions(text))


def _fractions(text: str) -> list[float]:
    words = re.split(r"\s*[,;:/]\s*|\s+", text.strip("'\" \t"))  # launch scripts quote twice, for eval
    # Megatron picks out digits and dots wherever they stand: it reads 9.8e1,2 as the three numbers 9.8, 1 and 2.
    plain = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word, re.ASCII) for word in words)
    weights = [float(word) for word in words] if plain else []
    if not 1 <= len(weights) <= 3 or not 0 < sum(weights) < math.inf:
        raise DataError(
            f"split {text!r} must be one to three numbers, none negative, with a positive sum, without signs or "
            "exponents, e.g. 969,30,1"
        )
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return [weight / total for weight in weights]


def _mcore(fractions: list[float], num_sequences: int) -> list[SequenceRange | None]:
    ranges: list[SequenceRange | None] = []
    start = 0.0
    for fraction in fractions:
        end = start + fraction
        ranges.append(None if end <= start else (round(start * num_sequences), round(end * num_sequences)))
        start = end
    return ranges


def _legacy(fractions: list[float], num_sequences: int) -> list[SequenceRange | None]:
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + round(fraction * num_sequences))
    surplus = bounds[-1] - num_sequences
    # The shift can make a boundary negative; Megatron would then read a sequence from the corpus's end.
    bounds = [0] + [max(bound - surplus, 0) for bound in bounds[1:]]
    return [(start, end) if end > start else None for start, end in zip(bounds, bounds[1:], strict=False)]
