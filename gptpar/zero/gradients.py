"""Gradient sums over micro-batches, in fp32, and over the data axis while the backward pass still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.topology import reduce_scatter_single
from gptpar.zero.place import DataAxis
from gptpar.zero.units import Unit

MOST_IN_FLIGHT = 2
"""Reductions whose whole-unit buffers are alive at once under ZeRO-2 and 3."""


class GradientSum:
    """Takes each parameter's gradient as autograd produces it and adds it to its unit's flat sum.

    Units are reduced in a fixed order, the reverse of the forward pass, whatever the order in which they complete:
    processes match collectives by their order alone, and one whose autograd differed would hang or add up the wrong
    pieces. Under ZeRO-0 and 1 the whole sum is kept and reduced in the step's last backward pass; under ZeRO-2 and 3
    each micro-batch's gradient is reduced at once and only this process's shard of the sum is kept.

    Args:
        units: in forward order.
        chunks: names of the units of each of this process's stages, in forward order.
        dtype: of the sum, fp32 or wider.
        reduce_dtype: in which gradients travel.
        done: called with a unit's name when its gradients of a backward pass are complete and being reduced.

    Attributes:
        shard: the complete sum's elements that this process's optimizer updates: all units' shards in a row.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Sequence[str]],
        axis: DataAxis,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reduce_dtype: torch.dtype,
        done: Callable[[str], None],
    ):
        self._axis, self._dtype, self._reduce_dtype, self._done = axis, dtype, reduce_dtype, done
        self._units = {unit.name: unit for unit in units}
        self._chunks = [list(dict.fromkeys(names)) for names in chunks]
        self._unit_of = {name: unit for unit in units for name in unit.slots}
        self.shard = torch.zeros(sum(unit.shard_length for unit in units), dtype=dtype, device=device)
        self.shards = dict(zip(self._units, self.shard.split([u.shard_length for u in units]), strict=True))
        self._keeps_all = axis.zero_stage < 2
        self._sums: dict[str, torch.Tensor] = {}
        if axis.shards == 1:
            self._sums = self.shards
        elif self._keeps_all:
            whole = torch.zeros(sum(unit.length for unit in units), dtype=dtype, device=device)
            self._sums = dict(zip(self._units, whole.split([unit.length for unit in units]), strict=True))
        self._arrived: set[str] = set()
        self._missing: dict[str, int] = {}
        self._waiting: deque[Unit] = deque()
        self._pending: deque[tuple[Any, torch.Tensor, Callable[[], Any]]] = deque()

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these parameters' gradients, by global name; their ``.grad`` is always empty afterwards."""
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def begin(self) -> None:
        """Start a new sum."""
        self._arrived.clear()
        if not self._keeps_all:
            self.shard.zero_()

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """A backward pass of a stage begins; ``last``: it is the step's last for that stage."""
        if last or not self._keeps_all:
            self._waiting.extend(self._units[name] for name in reversed(self._chunks[chunk]))
            self._missing = {unit.name: len(unit.slots) for unit in self._waiting}

    def end_backward(self) -> None:
        """The pass is over: what got no gradient counts as zero."""
        while self._waiting:
            self._reduce(self._waiting.popleft())

    @torch.no_grad()
    def _take(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        unit = self._unit_of[name]
        slot = unit.slots[name]
        view = self._sum_of(unit)[slot.start : slot.stop].view(slot.shape)
        if name in self._arrived:
            view.add_(parameter.grad)
        else:
            view.copy_(parameter.grad)
            self._arrived.add(name)
        parameter.grad = None
        if self._waiting:
            self._missing[unit.name] -= 1
            while self._waiting and self._missing[self._waiting[0].name] <= 0:
                self._reduce(self._waiting.popleft())

    def _sum_of(self, unit: Unit) -> torch.Tensor:
        if unit.name not in self._sums:
            self._sums[unit.name] = torch.zeros(unit.length, dtype=self._dtype, device=self.shard.device)
        return self._sums[unit.name]

    @torch.no_grad()
    def _reduce(self, unit: Unit) -> None:
        total, shard = self._sum_of(unit), self.shards[unit.name]
        for name, slot in unit.slots.items():
            if name not in self._arrived:
                total[slot.start : slot.stop].zero_()
        sent = total.to(self._reduce_dtype)
        if self._axis.shards > 1:
            into = torch.empty_like(shard, dtype=sent.dtype)
            work = reduce_scatter_single(into, sent, group=self._axis.group, async_op=True)
            self._pending.append((work, sent, lambda: shard.copy_(into) if self._keeps_all else shard.add_(into)))
        elif self._axis.group is not None:
            work = dist.all_reduce(sent, group=self._axis.group, async_op=True)
            self._pending.append((work, sent, lambda: shard.copy_(sent) if sent is not shard else None))
        if not self._keeps_all:
            del self._sums[unit.name]
            self._arrived.difference_update(unit.slots)
            while len(self._pending) > MOST_IN_FLIGHT:
                self._complete_one()
        self._done(unit.name)

    def _complete_one(self) -> None:
        work, _, then = self._pending.popleft()  # what is sent must live until it has arrived
        work.wait()
        then()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until this process's shard of the sum is complete."""
        while self._pending:
            self._complete_one()
