"""Ranges of flat vectors in which an update treats every element alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements; every parameter starts on a multiple, so that its views are aligned for vector and tensor-core loads."""

DECAYS, DECAYS_NOT = 0, 1
"""The parameter groups of a GPT."""

Family = tuple[int, ...]
"""Parameter groups whose hyperparameters are equal in every step, but that all except the first have no weight decay.

One launch of a GPU's kernel updates all groups of a family."""

GPT_FAMILIES: tuple[Family, ...] = ((DECAYS, DECAYS_NOT),)
"""The families of a GPT's parameter groups."""


@dataclass(frozen=True)
class GroupSpan:
    """Elements ``start`` to ``stop`` of a flat vector, which an update treats alike.

    Attributes:
        group: number of the optimizer group whose learning rate, weight decay and so on apply.
    """

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class OffloadedPartition:
    """Elements of one unit that the CPU optimizer updates, as one flat vector.

    Attributes:
        length: elements, with padding.
        spans: elements that are treated alike; they cover those of every parameter.
        counted: (start, stop) of the elements that this process counts in sums over the model.
    """

    unit: str
    length: int
    spans: tuple[GroupSpan, ...]
    counted: tuple[tuple[int, int], ...]

    def between(self, low: int, high: int) -> OffloadedPartition:
        """The elements from ``low`` to ``high``, numbered from ``low``."""
        spans = spans_between(self.spans, low, high)
        counted = tuple((max(a, low) - low, min(b, high) - low) for a, b in self.counted if a < high and low < b)
        return OffloadedPartition(self.unit, high - low, spans, counted)


def spans_between(spans: Sequence[GroupSpan], low: int, high: int) -> tuple[GroupSpan, ...]:
    """What of the spans lies between two places, numbered from ``low``."""
    return tuple(
        GroupSpan(max(span.start, low) - low, min(span.stop, high) - low, span.group)
        for span in spans
        if span.start < high and low < span.stop
    )
