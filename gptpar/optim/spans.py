"""Ranges of flat vectors in which an update treats every element alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every parameter starts at a multiple of this number of elements: aligned for vector and tensor-core loads."""

DECAYS, DECAYS_NOT = 0, 1
"""The parameter groups of a GPT."""

Family = tuple[int, ...]
"""Parameter groups with equal hyperparameters in every step, except that only the first group has weight decay.

One launch of a GPU kernel updates all groups of a family."""

GPT_FAMILIES: tuple[Family, ...] = ((DECAYS, DECAYS_NOT),)
"""The families of a GPT's parameter groups."""


@dataclass(frozen=True)
class GroupSpan:
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
        spans: ranges of one optimizer group each, which cover all parameters.
        counted: (start, stop) of elements that this process counts in sums over the model.
    """

    unit: str
    length: int
    spans: tuple[GroupSpan, ...]
    counted: tuple[tuple[int, int], ...]

    def between(self, low: int, high: int) -> OffloadedPartition:
        """The partition of elements ``low:high``; positions count from ``low``."""
        spans = spans_between(self.spans, low, high)
        counted = tuple((max(a, low) - low, min(b, high) - low) for a, b in self.counted if a < high and low < b)
        return OffloadedPartition(self.unit, high - low, spans, counted)


def spans_between(spans: Sequence[GroupSpan], low: int, high: int) -> tuple[GroupSpan, ...]:
    """The spans' intersections with ``low:high``; positions count from ``low``."""
    return tuple(
        GroupSpan(max(span.start, low) - low, min(span.stop, high) - low, span.group)
        for span in spans
        if span.start < high and low < span.stop
    )
