"""Where each parameter lies in the flat buffers. Pure.

A unit is one layer's parameters as one flat range: what is reduced, gathered and released at a time. It is padded so
that it can be cut into one equal shard for each data-parallel process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gptpar.optim.spans import ALIGNMENT
from gptpar.pipeline.stage import ParameterInfo


@dataclass(frozen=True)
class Slot:
    """One parameter's place: ``unit[start:stop]`` viewed as ``shape``.

    Attributes:
        end: where the next parameter begins; every tensor-parallel rank has the same, however uneven their shares.
        longest: elements of the longest share of any tensor-parallel rank.
        decays: whether weight decay applies.
        replicated: whether every tensor-parallel rank has the whole parameter.
        grad_sums: axes over which the gradient is summed, beside the data axis.
    """

    start: int
    stop: int
    end: int
    longest: int
    shape: torch.Size
    decays: bool
    replicated: bool
    grad_sums: frozenset[str]


@dataclass(frozen=True)
class Unit:
    """A layer's parameters in one flat range.

    Attributes:
        name: the layer's.
        length: elements with padding, a multiple of ``shards * ALIGNMENT``.
        shards: equal pieces into which it is cut.
    """

    name: str
    slots: dict[str, Slot]
    length: int
    shards: int

    @staticmethod
    def of(name: str, parameters: Mapping[str, ParameterInfo], shards: int) -> Unit:
        """Lay out a layer, given in forward order; parameters that are treated alike lie next to each other."""

        def kind(parameter: str) -> tuple[bool, list[str], bool]:
            info = parameters[parameter]
            return info.split is not None, sorted(info.grad_sums), not has_decay(parameter, info.full_shape)

        slots: dict[str, Slot] = {}
        start = 0
        for parameter in sorted(parameters, key=kind):
            info = parameters[parameter]
            sizes = list(info.shape)
            if info.split is not None:
                sizes[info.split.dim] = info.split.longest
            longest = math.prod(sizes)
            end = _round_up(start + longest, ALIGNMENT)
            split, _, bare = kind(parameter)
            stop = start + info.shape.numel()
            slots[parameter] = Slot(start, stop, end, longest, info.shape, not bare, not split, info.grad_sums)
            start = end
        return Unit(name, slots, _round_up(start, shards * ALIGNMENT), shards)

    @property
    def shard_length(self) -> int:
        """Elements of one shard."""
        return self.length // self.shards

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of the elements that are padding."""
        ends = [0, *(slot.stop for slot in self.slots.values())]
        for end, start in zip(ends, [*(slot.start for slot in self.slots.values()), self.length], strict=True):
            if end < start:
                yield end, start

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's view of a buffer of the unit's length."""
        return {name: buffer[slot.start : slot.stop].view(slot.shape) for name, slot in self.slots.items()}

    def held(self, shard: int) -> Iterator[tuple[str, int, int]]:
        """(parameter, first, last + 1) of the elements, counted within the parameter, that lie in a shard."""
        low, high = shard * self.shard_length, (shard + 1) * self.shard_length
        for name, slot in self.slots.items():
            first, last = max(low, slot.start), min(high, slot.stop)
            if first < last:
                yield name, first - slot.start, last - slot.start

    def held_between(self, shard: int, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """(parameter, its first element, where it and what follows of it begin and end) of a range of a shard."""
        base = shard * self.shard_length
        for name, first, last in self.held(shard):
            at = self.slots[name].start - base
            low, high = max(start, at + first), min(stop, at + last)
            if low < high:
                yield name, low - at, low, high

    def runs(self, shard: int) -> Iterator[tuple[int, int, bool, bool, frozenset[str]]]:
        """(start, stop, decays, replicated, grad_sums) of stretches of a shard, counted within it, treated alike."""
        low, high = shard * self.shard_length, (shard + 1) * self.shard_length
        current: list[int] = []
        kind: tuple[bool, bool, frozenset[str]] = (False, False, frozenset())
        for slot in self.slots.values():
            first, last = max(low, slot.start), min(high, slot.end)
            if first >= last:
                continue
            if current and kind == (slot.decays, slot.replicated, slot.grad_sums):
                current[1] = last - low
                continue
            if current:
                yield current[0], current[1], *kind
            current, kind = [first - low, last - low], (slot.decays, slot.replicated, slot.grad_sums)
        if current:
            yield current[0], current[1], *kind


def has_decay(name: str, shape: torch.Size) -> bool:
    """Whether weight decay applies: not to biases, not to vectors (Megatron's rule), judged on the full shape."""
    return len(shape) > 1 and not name.endswith(".bias")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
