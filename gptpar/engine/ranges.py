"""Parameter ranges: a process's elements, cut where the owner, the home or the parameter changes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

from gptpar.engine.units import Param, Unit
from gptpar.topology.mesh import Mesh

Key = TypeVar("Key")


class Home(Enum):
    """The place of an element's master weight, its optimizer state and its update."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Place:
    """A process's position on the mesh, and what ZeRO shards: what its part of each unit depends on.

    Attributes:
        mesh: of all processes.
        rank: this process's.
        zero_stage: above 0, the processes that hold copies of a unit divide its optimizer state among them.
    """

    mesh: Mesh = Mesh()
    rank: int = 0
    zero_stage: int = 0

    def position(self, axis: str) -> int:
        """The process's position on an axis."""
        return self.mesh.position(self.rank, axis)

    def sharded_over(self, copies_over: tuple[str, ...]) -> tuple[str, ...]:
        """The rows over which ZeRO shards a unit.

        Args:
            copies_over: the rows whose ranks hold copies of the unit.
        """
        return copies_over if self.zero_stage else ()

    def shards(self, copies_over: tuple[str, ...]) -> int:
        """Number of equal shards of a unit that has copies over these rows."""
        return self.mesh.size(*self.sharded_over(copies_over))

    def shard(self, unit: Unit) -> int:
        """Index of this process's shard of a unit."""
        return self.mesh.position(self.rank, *self.sharded_over(unit.copies_over))

    def is_first(self, unit: Unit) -> bool:
        """Whether this process is the first of those that read different tokens for a unit and hold this shard."""
        sharded = self.sharded_over(unit.copies_over)
        return self.mesh.position(self.rank, *(row for row in unit.copies_over if row not in sharded)) == 0


@dataclass(frozen=True)
class Range:
    """Contiguous elements of one parameter in this process's shard of a unit, all treated alike.

    Attributes:
        param: the parameter's global name.
        start, stop: position of the elements in the shard.
        first: position of the first element in the parameter's split on this tensor-parallel rank, in memory order.
        group: number of the optimizer group.
        counted: whether this process counts the elements in sums over the model: of all copies, one is counted.
    """

    unit: str
    param: str
    start: int
    stop: int
    first: int
    home: Home
    group: int
    counted: bool

    @cached_property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def between(self, low: int, high: int) -> Range | None:
        """The range's intersection with ``low:high`` of the shard; ``None`` if it is empty."""
        start, stop = max(self.start, low), min(self.stop, high)
        if start >= stop:
            return None
        if start == self.start and stop == self.stop:
            return self
        return replace(self, start=start, stop=stop, first=self.first + start - self.start)


def extents(unit: Unit, shard: int) -> Iterator[tuple[int, int, Param]]:
    """(start, stop, parameter) of each parameter in a shard, including the padding behind it."""
    low, high = shard * unit.shard_length, (shard + 1) * unit.shard_length
    for param in unit.params.values():
        start, stop = max(low, param.start), min(high, param.end)
        if start < stop:
            yield start - low, stop - low, param


def device_lengths(
    units: Sequence[Unit], place: Place, ratio: float, tied: Collection[str] = ()
) -> tuple[dict[str, int], int, int]:
    """Divide a process's elements between host and device, exact to the element; the device gets the first layers.

    The device's elements are updated at once, and the next forward pass needs the first layers first. Tensor-parallel
    ranks divide at the same positions, because they sum the gradients of replicated parameters. Where their splits of
    the vocabulary are uneven, all ranks use the longest split's length. Pipeline stages divide a tied unit at the same
    position, whatever else they hold: a checkpoint holds each of its elements once. So the ratio is applied to each
    tied unit by itself; the stage's other units make up the difference. With several tied units and little else, the
    stage may miss the ratio by up to one element a tied unit.

    Args:
        units: in forward order.
        ratio: the twin-flow ratio: which fraction of the elements the host updates, 0 to 1.
        tied: names of the units that other stages have copies of.

    Returns:
        (unit -> number of elements at the beginning of its shard that the device updates; number of the process's
        elements without padding; number of elements that the host updates)
    """
    reserved = {unit.name: list(_reserved(unit, place.shard(unit))) for unit in units}
    sizes = {name: sum(stop - start for start, stop in ranges) for name, ranges in reserved.items()}
    total = sum(sizes.values())
    quotas = {name: size - round(ratio * size) for name, size in sizes.items() if name in tied}
    left = max(0, total - round(ratio * total) - sum(quotas.values()))
    lengths: dict[str, int] = {}
    offloaded = 0
    for unit in units:
        size = sizes[unit.name]
        taken = quotas.get(unit.name, min(left, size))
        left -= 0 if unit.name in quotas else taken
        offloaded += size - taken
        lengths[unit.name] = unit.shard_length if taken == size else _end_of(reserved[unit.name], taken)
    return lengths, total, offloaded


def _end_of(ranges: Iterable[tuple[int, int]], count: int) -> int:
    """The position at which the first ``count`` elements of some ranges end."""
    end = 0
    for start, stop in ranges:
        if count:
            end = min(stop, start + count)
            count -= end - start
    return end


def _reserved(unit: Unit, shard: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each parameter in a shard, with the length of its longest tensor-parallel split."""
    low, high = shard * unit.shard_length, (shard + 1) * unit.shard_length
    for param in unit.params.values():
        start, stop = max(low, param.start), min(high, param.start + param.longest)
        if start < stop:
            yield start - low, stop - low


def merged(pieces: Iterable[tuple[int, int, Key]]) -> list[tuple[int, int, Key]]:
    """Join adjacent (start, stop, key) ranges that have the same key."""
    found: list[tuple[int, int, Key]] = []
    for start, stop, key in pieces:
        if start >= stop:
            continue
        if found and found[-1][1] == start and found[-1][2] == key:
            start = found.pop()[0]
        found.append((start, stop, key))
    return found
