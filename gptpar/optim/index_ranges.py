"""Sets of elements as an int64 array [ranges, 2] of (start, stop), ascending and disjoint; for thousands of ranges."""

from __future__ import annotations

import numpy as np


def ranges_of_rows(rows: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """The elements of some rows of a matrix [num_rows, width]; neighbouring rows are one range.

    Args:
        rows: row numbers, in any order, also repeated.
    """
    marked = np.zeros(num_rows, dtype=np.int8)
    marked[rows] = 1
    return ranges_of_marked(marked, width)


def ranges_of_marked(marked: np.ndarray, width: int) -> np.ndarray:
    """The elements of the rows [num_rows] that are 1 (int8, else 0); neighbouring rows are one range."""
    edges = np.diff(marked, prepend=np.int8(0), append=np.int8(0))
    return np.flatnonzero(edges).reshape(-1, 2) * width


def between(ranges: np.ndarray, low: int, high: int) -> np.ndarray:
    """The intersection of the ranges with [low, high)."""
    first, last = np.searchsorted(ranges[:, 1], low, "right"), np.searchsorted(ranges[:, 0], high, "left")
    return ranges[first:last].clip(low, high)


def outside(ranges: np.ndarray, length: int) -> np.ndarray:
    """The complement of the ranges in [0, length)."""
    gaps = np.concatenate([[0], ranges.ravel(), [length]]).reshape(-1, 2)
    return gaps[gaps[:, 0] < gaps[:, 1]]
