"""Which process sits where: the grid of ranks, as pure arithmetic.

Ranks are numbered with the tensor axis fastest, then data, then pipeline: neighbours in a tensor group, which talk
most, are neighbours in the machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; their product is the number of processes."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(data, tensor, pipeline) position of a rank."""
        return rank // self.tensor % self.data, rank % self.tensor, rank // (self.tensor * self.data)

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """The rank at a position; the inverse of :meth:`coordinates`."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same weights and different samples."""
        return [
            [self.rank(d, t, p) for d in range(self.data)] for p in range(self.pipeline) for t in range(self.tensor)
        ]

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each layer."""
        return [
            [self.rank(d, t, p) for t in range(self.tensor)] for p in range(self.pipeline) for d in range(self.data)
        ]

    def chains(self) -> list[list[int]]:
        """Ranks that pass activations to each other, by stage."""
        return [
            [self.rank(d, t, p) for p in range(self.pipeline)] for d in range(self.data) for t in range(self.tensor)
        ]

    def describe(self) -> str:
        """For example ``dp2 x tp2 x pp1``."""
        return f"dp{self.data} x tp{self.tensor} x pp{self.pipeline}"
