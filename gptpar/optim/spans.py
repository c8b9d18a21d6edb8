"""Ranges of flat vectors in which an update treats every element alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

ALIGNMENT = 64
"""Elements; every parameter starts on a multiple, so that its views are aligned for vector and tensor-core loads."""

DECAYS, DECAYS_NOT = 0, 1
"""The groups of a model that is trained by :class:`~gptpar.engine.master_adamw.MasterAdamW`."""


@dataclass(frozen=True)
class Run:
    """A stretch of elements that are treated alike.

    Attributes:
        group: number of the group whose learning rate, weight decay and so on apply.
        replicated: whether every tensor-parallel rank has the same elements.
        counted: whether this process counts them in sums over the model; of replicas, one does.
    """

    start: int
    stop: int
    group: int
    replicated: bool
    counted: bool

    def moved(self, start: int, stop: int) -> Run:
        """The same kind of stretch elsewhere."""
        return replace(self, start=start, stop=stop)

    def joins(self, other: Run) -> bool:
        """Whether the other one goes on where this one ends, and is of the same kind."""
        return self.stop == other.start and self == other.moved(self.start, self.stop)


@dataclass(frozen=True)
class Span:
    """Elements that an update treats alike: ``start`` to ``stop`` of a flat vector.

    Attributes:
        group: number of the optimizer group whose learning rate, weight decay and so on apply.
    """

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class OffloadedPartition:
    """The elements of one unit that the CPU optimizer updates, as one flat vector.

    Attributes:
        length: elements, with padding.
        spans: elements that are treated alike; they cover every parameter's elements.
        counted: (start, stop) of the elements that this process counts in sums over the model.
    """

    unit: str
    length: int
    spans: tuple[Span, ...]
    counted: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HostPiece:
    """The elements of one unit that the host updates.

    Attributes:
        length: elements.
        runs: stretches that are treated alike, counted within the piece; they cover it.
    """

    unit: str
    length: int
    runs: tuple[Run, ...]


def cut(runs: Sequence[Run], low: int, high: int) -> Iterator[Run]:
    """What of the stretches lies in a range, counted from the range's beginning."""
    for run in runs:
        start, stop = max(run.start, low), min(run.stop, high)
        if start < stop:
            yield run.moved(start - low, stop - low)


def joined(pieces: Sequence[tuple[int, Sequence[Run]]]) -> list[Run]:
    """Stretches of (length, runs) pieces laid in a row, as long as possible."""
    found: list[Run] = []
    base = 0
    for length, runs in pieces:
        for run in runs:
            moved = run.moved(base + run.start, base + run.stop)
            if found and found[-1].joins(moved):
                found[-1] = found[-1].moved(found[-1].start, moved.stop)
            else:
                found.append(moved)
        base += length
    return found


def counted(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """The elements that this process counts, in stretches as long as possible."""
    found: list[tuple[int, int]] = []
    for run in runs:
        if run.counted and found and found[-1][1] == run.start:
            found[-1] = (found[-1][0], run.stop)
        elif run.counted:
            found.append((run.start, run.stop))
    return found
