"""Ranges of elements as rows (first, one behind the last) of an int64 array: ascending, apart, thousands at a time."""

from __future__ import annotations

import numpy as np


def ranges_of_rows(rows: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """The elements of some rows of a matrix [num_rows, width]; neighbouring rows are one range.

    Args:
        rows: their numbers, in any order, as often as one likes.
    """
    marked = np.zeros(num_rows + 2, dtype=np.int8)  # with an unmarked row at either end
    marked[rows + 1] = 1
    return np.flatnonzero(np.diff(marked)).reshape(-1, 2) * width


def between(ranges: np.ndarray, low: int, high: int) -> np.ndarray:
    """What of the ranges lies in [low, high)."""
    first, last = np.searchsorted(ranges[:, 1], low, "right"), np.searchsorted(ranges[:, 0], high, "left")
    return ranges[first:last].clip(low, high)


def outside(ranges: np.ndarray, length: int) -> np.ndarray:
    """What of [0, length) lies in none of the ranges."""
    gaps = np.concatenate([[0], ranges.ravel(), [length]]).reshape(-1, 2)
    return gaps[gaps[:, 0] < gaps[:, 1]]
