"""Chooses few candidates that together have every pair of values that any candidate has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from gptpar.plan.space.candidate import Candidate

Pair = tuple[tuple[str, Any], ...]


def pairwise(candidates: Sequence[Candidate]) -> list[Candidate]:
    """A covering of pairs (Cohen et al. 1997), chosen greedily: the candidate with the most new pairs comes next.

    Most faults of a combination show in two of its values already. A field that a candidate leaves as it is counts as
    a value, too.
    """
    fields = sorted({name for one in candidates for name in one.changes})
    size = min(2, len(fields))  # candidates that differ in one field have values alone
    pairs_of = [set(combinations([(name, one.changes.get(name)) for name in fields], size)) for one in candidates]
    missing: set[Pair] = set().union(*pairs_of)
    chosen: list[int] = []
    while missing:
        best = max(range(len(candidates)), key=lambda number: len(pairs_of[number] & missing))
        missing -= pairs_of[best]
        chosen.append(best)
    return [candidates[number] for number in sorted(chosen)]
