"""Finds the rows in which a final gradient differs from the partial gradient that was submitted before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from gptpar.offload.buckets import Bucket, ranges_of_marked
from gptpar.offload.transfers import Transfers

NOTHING = np.empty((0, 2), dtype=np.int64)
"""The ranges that are left open where a comparison finds what changes."""


class RowComparison:
    """Compares on the device, for one unit that is a matrix [rows, width]; a NaN differs from everything.

    Args:
        width: elements of a row.
        first: the unit's first offloaded element, which may be in the middle of a row.
        transfers: copy the result to the host.
    """

    def __init__(self, width: int, first: int, transfers: Transfers):
        self._width, self._before, self._transfers = width, first % width, transfers
        self._partial: torch.Tensor | None = None

    def submit(self, grad: torch.Tensor, buckets: Sequence[Bucket], *, is_final: bool) -> None:
        """Note a partial gradient, or tell those of the unit's buckets that have one where the final one differs."""
        with_partial = [bucket for bucket in buckets if bucket.partial is not None]
        if not is_final:
            self.take_partial(grad)
        elif with_partial:
            changed = self.changed(grad)
            for bucket in with_partial:
                bucket.take_changes(changed)

    def take_partial(self, grad: torch.Tensor) -> None:
        """Compare with this partial gradient, whose memory does not change until the final one is submitted."""
        self._partial = grad

    def changed(self, final: torch.Tensor) -> Callable[[], np.ndarray]:
        """Begin to compare the unit's offloaded elements.

        Args:
            final: [elements] on the device.

        Returns:
            A function that waits for the device and returns the ranges (:mod:`~gptpar.offload.buckets`) of the
            rows that differ, within the offloaded elements.
        """
        assert self._partial is not None
        differs = final != self._partial
        cut = -self._before % self._width
        rows = [differs[cut:].view(-1, self._width).any(dim=1)]
        if cut:
            rows.insert(0, differs[:cut].any()[None])
        read = self._transfers.read_flags(torch.cat(rows))
        return cache(lambda: (ranges_of_marked(read(), self._width) - self._before).clip(0))
