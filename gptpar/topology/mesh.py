"""The mesh: processes on named axes, as pure arithmetic; which rank has which place on each.

An axis is a field of :class:`Mesh` and a row of ``ROWS``, or several rows: the expert axis is folded over the context
and the data axis. It has a part of each, and ranks that differ by their positions on the rest hold the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

TENSOR = "tensor"
"""The axis of ranks that split each layer."""
CONTEXT = "context"
"""The axis of ranks that hold the same weights and different tokens of the same samples."""
DATA = "data"
"""The axis of ranks that hold the same weights and different samples."""
EXPERT = "expert"
"""The axis of ranks that hold different experts and different tokens."""
EXPERT_DATA = "expert_data"
"""The axis of ranks that hold the same experts and different tokens."""
PIPELINE = "pipeline"
"""The axis of ranks that hold different layers and pass activations to each other."""
EXPERTS_OF_CONTEXT, REST_OF_CONTEXT = "experts_of_context", "rest_of_context"
EXPERTS_OF_DATA, REST_OF_DATA = "experts_of_data", "rest_of_data"

ROWS = (TENSOR, EXPERTS_OF_CONTEXT, REST_OF_CONTEXT, EXPERTS_OF_DATA, REST_OF_DATA, PIPELINE)
"""The order in which ranks are numbered, the fastest row first: a tensor group, whose ranks exchange most, has
neighbouring ranks and thus one machine."""
PARTS = {
    CONTEXT: (EXPERTS_OF_CONTEXT, REST_OF_CONTEXT),
    DATA: (EXPERTS_OF_DATA, REST_OF_DATA),
    EXPERT: (EXPERTS_OF_CONTEXT, EXPERTS_OF_DATA),
    EXPERT_DATA: (REST_OF_CONTEXT, REST_OF_DATA),
}
"""Axis -> the rows that it consists of, for axes that are no row."""
COPIES = (*PARTS[CONTEXT], *PARTS[DATA])
"""The rows whose ranks hold copies of a parameter that no axis splits, and read different tokens."""


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, by the sizes of its axes; the expert axis is folded over context and data.

    Raises:
        ValueError: the expert axis does not divide context x data.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if (copies := self.context * self.data) % self.expert:
            raise ValueError(f"{self.expert} expert-parallel processes do not divide {copies} that have other tokens")

    def size(self, *axes: str) -> int:
        """Number of ranks that differ by their positions on these axes alone; without axes, 1."""
        return math.prod([self._sizes[row] for row in rows_of(axes)])

    @cached_property
    def _sizes(self) -> dict[str, int]:
        of_context = math.gcd(self.expert, self.context)  # neighbours first, which exchange fastest
        of_data = self.expert // of_context
        return {
            TENSOR: self.tensor,
            EXPERTS_OF_CONTEXT: of_context,
            REST_OF_CONTEXT: self.context // of_context,
            EXPERTS_OF_DATA: of_data,
            REST_OF_DATA: self.data // of_data,
            PIPELINE: self.pipeline,
        }

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.size(*ROWS)

    def divided(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The rows of some axes that have several ranks, the fastest first."""
        return tuple(row for row in rows_of(tuple(axes)) if self.size(row) > 1)

    def position(self, rank: int, *axes: str) -> int:
        """A rank's position on an axis, or among the ranks that differ by their positions on several axes alone."""
        found, count = 0, 1
        for row in rows_of(axes):
            found += rank // self._stride(row) % self._sizes[row] * count
            count *= self._sizes[row]
        return found

    def rank(self, **positions: int) -> int:
        """The rank at a position on each axis (0 where none is given); the inverse of :meth:`position`."""
        found = 0
        for axis, position in positions.items():
            for row in rows_of((axis,)):
                found += self._stride(row) * (position % self._sizes[row])
                position //= self._sizes[row]
        return found

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ by their positions on these axes alone, each in ascending order of ranks."""
        others = [row for row in ROWS if row not in rows_of(axes)]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(tuple(self.position(rank, row) for row in others), []).append(rank)
        return list(found.values())

    def describe(self) -> str:
        """The sizes of the axes, for example ``dp2 x tp2 x pp1``."""
        expert = f" x ep{self.expert}" if self.expert > 1 else ""
        context = f" x cp{self.context}" if self.context > 1 else ""
        return f"dp{self.data} x tp{self.tensor} x pp{self.pipeline}{context}{expert}"

    def _stride(self, row: str) -> int:
        """The difference of the ranks of neighbours on a row."""
        return self.size(*ROWS[: ROWS.index(row)])


@cache
def rows_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The rows that axes consist of, the fastest first."""
    rows = {row for axis in axes for row in PARTS.get(axis, (axis,))}
    return tuple(row for row in ROWS if row in rows)


def copies_over(split: Iterable[str]) -> tuple[str, ...]:
    """The rows whose ranks hold copies of a parameter, and read different tokens.

    Over these its gradient is summed, and ZeRO shards it.

    Args:
        split: the axes that split the parameter's value.
    """
    return tuple(row for row in COPIES if row not in rows_of(tuple(split)))
