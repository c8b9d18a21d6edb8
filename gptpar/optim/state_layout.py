"""Lays out optimizer states: the vector of a state holds only the elements whose update has it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from gptpar.optim.group_ranges import ALIGNMENT, GroupRange
from gptpar.optim.update import Update


class _Run(NamedTuple):
    """Elements ``start:stop`` of the flat vector, which begin at ``offset`` of the compact one."""

    start: int
    stop: int
    offset: int


class CompactVector:
    """A vector of the elements of some groups, without those between them.

    Neighbouring ranges of these groups are one run, with the padding between them. If all elements belong to these
    groups, there is one run, and the compact vector is as long as the flat one.

    Args:
        group_ranges: the groups of a flat vector's elements, ascending; what lies between them is padding.
        groups: whose elements are in the compact vector.
        length: of the flat vector.

    Attributes:
        length: of the compact vector.
    """

    def __init__(self, group_ranges: Iterable[GroupRange], groups: Collection[int], length: int):
        parts = [(has, list(run)) for has, run in groupby(group_ranges, key=lambda one: one.group in groups)]
        runs = [(run[0].start, run[-1].stop) for has, run in parts if has]
        self._runs: list[_Run] = []
        self.length = 0
        for start, stop in runs if len(runs) < len(parts) else [(0, length)]:
            offset = -(-self.length // ALIGNMENT) * ALIGNMENT
            self._runs.append(_Run(start, stop, offset))
            self.length = offset + stop - start

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(start, stop) in the flat vector of the neighbouring elements that the compact vector has."""
        return [(run.start, run.stop) for run in self._runs]

    def view(self, vector: Tensor, start: int, stop: int) -> Tensor:
        """The elements ``start:stop`` of the flat vector, which lie in one run, in the compact vector [length]."""
        run = self._runs[bisect_right(self._runs, start, key=lambda one: one.start) - 1]
        assert run.start <= start <= stop <= run.stop, f"{start} to {stop} is not in {run}"
        return vector[run.offset + start - run.start : run.offset + stop - run.start]


class StateLayout:
    """The layout of each state's vector beside the flat vector of the master weights.

    Args:
        group_ranges, length: see :class:`CompactVector`.
        updates: by group.
    """

    def __init__(self, group_ranges: Sequence[GroupRange], updates: Sequence[Update], length: int):
        self._vectors = {
            name: CompactVector(
                group_ranges, {group for group, update in enumerate(updates) if name in update.states}, length
            )
            for name in dict.fromkeys(name for update in updates for name in update.states)
        }
        self._rounded = {name: dtype for update in updates for name, dtype in update.rounded.items()}

    @property
    def lengths(self) -> dict[str, int]:
        """State -> number of its vector's elements."""
        return {name: vector.length for name, vector in self._vectors.items()}

    def dtype_of(self, name: str, wide: torch.dtype) -> torch.dtype:
        """The number format of a state, which is the same for all updates that have it.

        Args:
            wide: of the master weights, and of states that are not rounded.
        """
        return self._rounded.get(name, wide)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of all states' vectors.

        Args:
            itemsize: bytes of a number that is not rounded.
        """
        rounded = {name: dtype.itemsize for name, dtype in self._rounded.items()}
        return sum(rounded.get(name, itemsize) * length for name, length in self.lengths.items())

    def view(self, name: str, vector: Tensor, start: int, stop: int) -> Tensor:
        """The values of elements ``start:stop``, which all have this state, in its vector.

        Args:
            name: ``weights`` or a state.
        """
        compact = self._vectors.get(name)
        return vector[start:stop] if compact is None else compact.view(vector, start, stop)
