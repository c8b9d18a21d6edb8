"""Stretches of a process's elements that the optimizer treats alike, and their division between device and host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gptpar.engine.units import Unit
from gptpar.optim.spans import DECAYS, DECAYS_NOT, Run, cut, joined


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
    for start, stop, decays, replicated, grad_sums in unit.runs(shard):
        counted = unit.name not in copies and (first_tensor_rank or not replicated)
        yield Run(start, stop, DECAYS if decays else DECAYS_NOT, grad_sums, counted)


def device_runs(units: Sequence[Unit], on_device: Mapping[str, int], runs: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The device's stretches of all units' shards in a row."""
    return joined([(on_device[u.name], list(cut(runs[u.name], 0, on_device[u.name]))) for u in units])
