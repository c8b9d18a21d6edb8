"""Ranges of elements, computed by the thousand, beside plain loops over single elements."""

from __future__ import annotations

import numpy as np
import pytest

from gptpar.offload.index_ranges import between, outside, ranges_of_rows


def elements(ranges: np.ndarray) -> list[int]:
    return [element for start, stop in ranges.tolist() for element in range(start, stop)]


@pytest.mark.parametrize("num_rows, count", [(1, 1), (7, 0), (7, 3), (7, 50), (200, 60), (5000, 3000)])
def test_ranges_are_those_of_a_plain_loop(num_rows: int, count: int) -> None:
    """Repeated rows, rows at either end, all rows, no rows."""
    random = np.random.default_rng(num_rows + count)
    for width in (1, 3, 64):
        rows = random.integers(0, num_rows, count)
        wanted = [row * width + column for row in sorted(set(rows.tolist())) for column in range(width)]
        found = ranges_of_rows(rows, num_rows, width)
        assert elements(found) == wanted
        assert all(stop < start for (_, stop), (start, _) in zip(found.tolist(), found.tolist()[1:], strict=False))
        length = num_rows * width
        for low, high in ((0, length), (0, 0), *np.sort(random.integers(0, length + 1, (20, 2))).tolist()):
            assert elements(between(found, low, high)) == [element for element in wanted if low <= element < high]
        assert elements(outside(found, length)) == sorted(set(range(length)) - set(wanted))


def test_neighbouring_rows_are_one_range() -> None:
    assert ranges_of_rows(np.array([4, 2, 3, 3, 9, 0]), 10, 8).tolist() == [[0, 8], [16, 40], [72, 80]]
    assert ranges_of_rows(np.arange(10), 10, 8).tolist() == [[0, 80]]
