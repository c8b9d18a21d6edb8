"""Rows in which a final gradient differs from the partial one, also where the unit is offloaded from within a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptpar.offload.index_ranges import ranges_of_marked
from gptpar.offload.row_comparison import RowComparison
from gptpar.offload.transfers import SameMemory


@pytest.mark.parametrize("first", [0, 1, 3, 4, 10])
def test_rows_that_differ_are_found_wherever_the_offloaded_part_begins(first: int) -> None:
    rows, width = 7, 4
    generator = torch.Generator().manual_seed(first)
    for changed in ([], [0], [1, 2], [6], [0, 3, 5, 6], list(range(7))):
        partial = torch.randn(rows, width, generator=generator)
        final = partial.clone()
        for row in changed:
            final[row, row % width] += 1.0
        comparison = RowComparison(width, first, SameMemory())
        comparison.take_partial(partial.flatten()[first:])
        found = comparison.changed(final.flatten()[first:])()
        expected = np.zeros(rows * width, dtype=bool)
        for row in changed:
            expected[row * width : (row + 1) * width] = True
        # Where the first row is cut, it counts by its offloaded elements alone.
        cut_row = first // width
        if first % width and cut_row in changed and cut_row % width < first % width:
            expected[: (cut_row + 1) * width] = False
        marked = np.zeros(rows * width - first, dtype=bool)
        for start, stop in found:
            marked[start:stop] = True
        assert (marked == expected[first:]).all()


def test_nan_differs_and_minus_zero_does_not() -> None:
    comparison = RowComparison(2, 0, SameMemory())
    comparison.take_partial(torch.tensor([0.0, 1.0, float("nan"), 1.0]))
    assert comparison.changed(torch.tensor([-0.0, 1.0, float("nan"), 1.0]))().tolist() == [[2, 4]]


def test_marked_rows_at_both_ends_are_ranges() -> None:
    assert ranges_of_marked(np.array([1, 0, 1, 1], dtype=np.int8), 3).tolist() == [[0, 3], [6, 12]]
    assert ranges_of_marked(np.array([0, 0], dtype=np.int8), 3).tolist() == []
