"""Reads ``PATTERN=FACTOR``: a factor for the parameters whose names a pattern matches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def read_override(word: str) -> tuple[str, float]:
    """``embedding*=0`` -> (``embedding*``, 0.0).

    Raises:
        ValueError: why it cannot be read, as a part of a sentence.
    """
    pattern, equals, text = word.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not equals or not pattern or not 0 <= factor < math.inf:
        raise ValueError("PATTERN=FACTOR is needed, such as 'embedding*=0', with a factor of 0 or more")
    return pattern, factor


def override_problems(flag: str, words: Sequence[str] | None) -> Iterator[str]:
    """A sentence for each word that cannot be read."""
    for word in words or ():
        try:
            read_override(word)
        except ValueError as error:
            yield f"{flag} {word[:80]}: {error}."
