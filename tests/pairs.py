"""Parameters of tests that meet in pairs, where all combinations would be many and no three of them interact."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def every_pair(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """``parametrize`` with few combinations that have every pair of values of two parameters."""
    names, rows = list(values), list(itertools.product(*(range(len(some)) for some in values.values())))
    places = list(itertools.combinations(range(len(names)), 2))
    missing = {(a, b, row[a], row[b]) for row in rows for a, b in places}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum((a, b, row[a], row[b]) in missing for a, b in places))
        missing -= {(a, b, best[a], best[b]) for a, b in places}
        chosen.append(tuple(some[place] for some, place in zip(values.values(), best, strict=True)))
    return pytest.mark.parametrize(names, chosen)


def in_turns(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """``parametrize`` with each value of the first parameter beside two of the others' in turn."""
    names, (first, *others) = list(values), values.values()
    chosen = [
        (one, *(some[(2 * number + more) % len(some)] for some in others))
        for number, one in enumerate(first)
        for more in range(2)
    ]
    return pytest.mark.parametrize(names, chosen)
