"""``GroupRange``: elements of a flat vector in one optimizer group; the optimizer groups of a GPT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every parameter starts at a multiple of this number of elements: aligned for vector and tensor-core loads."""

DECAYS, DECAYS_NOT = 0, 1
"""The parameter groups of a GPT."""


def is_matrix(name: str, num_dims: int) -> bool:
    """Whether a GPT's parameter is a matrix, which decays; biases and vectors do not (Megatron's rule)."""
    return num_dims > 1 and not name.endswith("bias")


Family = tuple[int, ...]
"""Parameter groups with equal hyperparameters in every step, except that only the first group has weight decay.

One launch of a GPU kernel updates all groups of a family."""

GPT_FAMILIES: tuple[Family, ...] = ((DECAYS, DECAYS_NOT),)
"""The families of a GPT's parameter groups."""


@dataclass(frozen=True)
class GroupRange:
    """Elements ``start:stop`` of a flat vector, all in one optimizer group.

    Attributes:
        group: number of the optimizer group, which gives learning rate, weight decay and so on.
    """

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class OffloadedPartition:
    """The elements of one unit that the CPU optimizer updates, as one flat vector.

    Attributes:
        length: number of elements, with padding.
        group_ranges: ranges of one optimizer group each, which cover all parameters.
        counted: (start, stop) of elements that this process counts in sums over the model.
    """

    unit: str
    length: int
    group_ranges: tuple[GroupRange, ...]
    counted: tuple[tuple[int, int], ...]

    def between(self, low: int, high: int) -> OffloadedPartition:
        """The partition of elements ``low:high``; positions count from ``low``."""
        group_ranges = group_ranges_between(self.group_ranges, low, high)
        counted = tuple((max(a, low) - low, min(b, high) - low) for a, b in self.counted if a < high and low < b)
        return OffloadedPartition(self.unit, high - low, group_ranges, counted)


def group_ranges_between(group_ranges: Sequence[GroupRange], low: int, high: int) -> tuple[GroupRange, ...]:
    """The intersections of the ranges with ``low:high``; positions count from ``low``."""
    return tuple(
        GroupRange(max(one.start, low) - low, min(one.stop, high) - low, one.group)
        for one in group_ranges
        if one.start < high and low < one.stop
    )
