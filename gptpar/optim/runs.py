"""Stretches of a process's elements that the optimizer treats alike, and their division between device and host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gptpar.zero.units import Unit

DECAYS, DECAYS_NOT = 0, 1
"""The groups of a model that is trained by :class:`~gptpar.optim.adamw.MasterAdamW`."""


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
class Division:
    """Which elements of each unit's shard the device updates: the first ones; the host updates the others.

    Attributes:
        on_device: unit -> how many.
        elements, offloaded: of this process and of those the host's, without padding.
    """

    on_device: dict[str, int]
    elements: int
    offloaded: int

    @property
    def ratio(self) -> float:
        """The host's share of the elements."""
        return self.offloaded / self.elements if self.elements else 0.0


def divide(units: Sequence[Unit], shard: int, ratio: float) -> Division:
    """Give the host a share of a process's elements, exact to the element, and the device the first layers.

    The device's part is done at once, and the next forward pass needs the first layers first. Tensor-parallel ranks
    cut at the same places, since they sum the gradients of what they all have; where their shares of the vocabulary
    are uneven, the longest counts for all.

    Args:
        units: in forward order.
        shard: which shard of each unit is this process's.
        ratio: the host's share, 0 to 1.
    """
    total = sum(stop - start for unit in units for start, stop in _stretches(unit, shard))
    offloaded = round(ratio * total)
    left = total - offloaded
    on_device: dict[str, int] = {}
    for unit in units:
        cut_at, whole = 0, True
        for start, stop in _stretches(unit, shard):
            taken = min(left, stop - start)
            left -= taken
            whole &= taken == stop - start
            if taken:
                cut_at = start + taken
        on_device[unit.name] = unit.shard_length if whole else cut_at
    return Division(on_device, total, offloaded)


def _stretches(unit: Unit, shard: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each parameter's elements in a shard, counted within it."""
    low, high = shard * unit.shard_length, (shard + 1) * unit.shard_length
    for slot in unit.slots.values():
        start, stop = max(low, slot.start), min(high, slot.start + slot.longest)
        if start < stop:
            yield start - low, stop - low


def runs_of(unit: Unit, shard: int, *, first_tensor_rank: bool, copies: frozenset[str]) -> Iterator[Run]:
    """Stretches of one unit's shard, counted within it.

    Args:
        first_tensor_rank: whether this process counts what all tensor-parallel ranks have.
        copies: units that another stage counts.
    """
    for start, stop, decays, replicated in unit.runs(shard):
        counted = unit.name not in copies and (first_tensor_rank or not replicated)
        yield Run(start, stop, DECAYS if decays else DECAYS_NOT, replicated, counted)


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


def device_runs(units: Sequence[Unit], on_device: Mapping[str, int], runs: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The device's stretches of all units' shards in a row."""
    return joined([(on_device[u.name], list(cut(runs[u.name], 0, on_device[u.name]))) for u in units])
