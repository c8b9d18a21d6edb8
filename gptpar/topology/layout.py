"""The grid of ranks: which rank has which place on the tensor, data and pipeline axes, as pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

TENSOR = "tensor"
"""The axis of ranks that split each layer."""
DATA = "data"
"""The axis of ranks that hold the same weights and different samples."""
PIPELINE = "pipeline"
"""The axis of ranks that hold different layers and pass activations to each other."""

FASTEST_FIRST = (TENSOR, DATA, PIPELINE)
"""How ranks are numbered: a tensor group, whose ranks exchange most, has neighbouring ranks and thus one machine."""


@dataclass(frozen=True)
class Layout:
    """A grid of ranks, by the sizes of its axes; their product is the number of processes."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def size(self, axis: str) -> int:
        """Number of ranks on an axis."""
        return {TENSOR: self.tensor, DATA: self.data, PIPELINE: self.pipeline}[axis]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return math.prod(map(self.size, FASTEST_FIRST))

    def position(self, rank: int, axis: str) -> int:
        """A rank's position on an axis."""
        return rank // self._stride(axis) % self.size(axis)

    def rank(self, **positions: int) -> int:
        """The rank at a position on each axis (0 where none is given); the inverse of :meth:`position`."""
        return sum(self._stride(axis) * position for axis, position in positions.items())

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ by their positions on these axes alone, each in ascending order of ranks."""
        others = [axis for axis in FASTEST_FIRST if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(tuple(self.position(rank, axis) for axis in others), []).append(rank)
        return list(found.values())

    def describe(self) -> str:
        """For example ``dp2 x tp2 x pp1``."""
        return f"dp{self.data} x tp{self.tensor} x pp{self.pipeline}"

    def _stride(self, axis: str) -> int:
        """The difference of the ranks of neighbours on an axis."""
        return math.prod(map(self.size, FASTEST_FIRST[: FASTEST_FIRST.index(axis)]))
