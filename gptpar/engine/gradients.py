"""Gradient sums over micro-batches, in fp32, and over the data axis while the backward pass still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.engine.data_axis import DataAxis
from gptpar.engine.units import Unit
from gptpar.topology import reduce_scatter_single

MOST_IN_FLIGHT = 2
"""Reductions whose whole-unit buffers are alive at once under ZeRO-2 and 3."""


class GradientSum:
    """Takes each parameter's gradient as autograd produces it and adds it to its unit's flat sum.

    Units are reduced in a fixed order, the reverse of the forward pass, whatever the order in which they complete:
    processes match collectives by their order alone, and one whose autograd differed would hang or add up the wrong
    pieces. Under ZeRO-0 and 1 the whole sum is kept and reduced in the step's last backward pass; under ZeRO-2 and 3
    each micro-batch's gradient is reduced at once and only this process's shard of the sum is kept. Of a unit that the
    host updates, nothing is kept that a single micro-batch does not need.

    Args:
        units: in forward order.
        chunks: names of the units of each of this process's stages, in forward order.
        dtype: of the sum, fp32 or wider; where nothing is ever added, that of the gradients is enough.
        reduce_dtype: in which gradients travel.
        done: called with a unit's name when its gradients of a backward pass are complete and being reduced.
        on_device: unit -> how many of its shard's elements, the first ones, the device's optimizer updates; by default
            all of them.
        arriving_dtype: of the gradients that autograd produces. What the host updates of a single micro-batch and a
            single process is never anything else.
        to_host: takes the gradient of a unit that the CPU updates wholly or in part: (unit, the complete sum of its
            whole shard, where the device's elements of it belong). It fills in the latter. The sum's memory stays as
            it is until the unit's next backward pass.
        to_host_early: takes (unit, a sum, a part of it, what is to be added to that or ``None``) before that; see
            :meth:`take_early`.
        ahead: whether to take the memory of those sums at the beginning of a step, so that the step uses it for nothing
            else: a recording of the step would do so before the host has fetched them.

    Attributes:
        shard: the complete sum's elements that the device's optimizer updates: all units' in a row.
        shards: the same by unit.
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
        on_device: Mapping[str, int] | None = None,
        arriving_dtype: torch.dtype | None = None,
        to_host: Callable[[Unit, torch.Tensor, torch.Tensor], None] | None = None,
        to_host_early: Callable[[Unit, torch.Tensor, slice, torch.Tensor | None], None] | None = None,
        ahead: bool = False,
    ):
        self._axis, self._dtype, self._reduce_dtype, self._done = axis, dtype, reduce_dtype, done
        self._to_host, self._to_host_early, self._arriving_dtype = to_host, to_host_early, arriving_dtype or dtype
        self._units = {unit.name: unit for unit in units}
        self._chunks = [list(dict.fromkeys(names)) for names in chunks]
        self._unit_of = {name: unit for unit in units for name in unit.slots}
        lengths = [unit.shard_length if on_device is None else on_device[unit.name] for unit in units]
        self.shard = torch.zeros(sum(lengths), dtype=dtype, device=device)
        self.shards = dict(zip(self._units, self.shard.split(lengths), strict=True))
        self._keeps_all, self._single, self._last = axis.zero_stage < 2, True, False
        here = [unit for unit, length in zip(units, lengths, strict=True) if length == unit.shard_length]
        self._streams = len(here) < len(units)
        self._ahead = [unit for unit in units if unit not in here] if ahead else []
        self._sums: dict[str, torch.Tensor] = {}
        if axis.shards == 1:
            self._sums = {unit.name: self.shards[unit.name] for unit in here}
        elif self._keeps_all:
            whole = torch.zeros(sum(unit.length for unit in here), dtype=dtype, device=device)
            pieces = whole.split([unit.length for unit in here])
            self._sums = {unit.name: piece for unit, piece in zip(here, pieces, strict=True)}
        self._fixed = frozenset(self._sums)
        self._totals: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._summed: set[str] = set()
        self._fresh: dict[str, dict[str, torch.Tensor]] = {}
        self._missing: dict[str, int] = {}
        self._waiting: deque[tuple[Unit, bool]] = deque()
        self._pending: deque[tuple[Callable[[], None], tuple[torch.Tensor, ...]]] = deque()
        to_streams = self._streams and axis.group is not None and device.type == "cuda"
        self._aside = torch.cuda.Stream(device) if to_streams else None

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these parameters' gradients, by global name; their ``.grad`` is always empty afterwards."""
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def begin(self, num_micro_batches: int) -> None:
        """Start a new sum."""
        self._arrived.clear()
        self._summed.clear()
        self._single = num_micro_batches == 1
        for unit in self._ahead:
            self._sum_of(unit)

    def begin_forward(self, *, last: bool) -> None:
        """A forward pass of a stage begins; ``last``: it is the step's last for that stage."""
        self._last = last

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """A backward pass of a stage begins; ``last``: it is the step's last for that stage."""
        self._missing = {name: len(self._units[name].slots) for name in self._chunks[chunk]}
        if last or not self._keeps_all:
            self._waiting.extend((self._units[name], last) for name in reversed(self._chunks[chunk]))

    def end_backward(self) -> None:
        """The pass is over: what got no gradient counts as zero."""
        for unit in list(self._fresh):
            self._add(self._units[unit])
        while self._waiting:
            self._reduce(*self._waiting.popleft())

    @torch.no_grad()
    def take_early(self, name: str, grad: torch.Tensor, rows: slice) -> None:
        """Some rows of a parameter's gradient, to which the backward pass will add something in some of them.

        The parameter is all of a unit that the host updates, of a single process without a pipeline. With the step's
        last forward pass the sum as it is now goes to the host. When it does so complete, the rows to which nothing was
        added are the same bits, so that it may be written over memory on its way to the host (but the sign of a zero
        may differ where several micro-batches are summed, which changes no update).

        Args:
            rows: those after the ones of the call before.
        """
        if not self._last:
            return
        assert self._axis.group is None and self._to_host_early is not None
        unit, width = self._unit_of[name], grad.shape[1]
        total, flat, low = self._sum_of(unit), grad.reshape(-1), self.shards[unit.name].numel()
        first, last = rows.start * width, rows.stop * width
        part = slice(max(low, first) - low, max(low, last) - low)
        if self._single:
            torch.add(flat[first:last], 0.0, out=total[first:last])  # as autograd will add zeros: -0 becomes 0
            self._to_host_early(unit, total[low:], part, None)
        else:
            self._to_host_early(unit, total[low:], part, flat[low:][part])

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        unit = self._unit_of[name]
        self._fresh.setdefault(unit.name, {})[name] = parameter.grad.detach()
        parameter.grad = None
        self._missing[unit.name] -= 1
        if not self._missing[unit.name]:
            self._add(unit)
        while self._waiting and not self._missing[self._waiting[0][0].name]:
            self._reduce(*self._waiting.popleft())

    @torch.no_grad()
    def _add(self, unit: Unit) -> None:
        """Add a unit's gradients to its sum, together: launched one by one they would keep the host busy."""
        fresh, total = self._fresh.pop(unit.name), self._sum_of(unit)
        views = {name: total[(s := unit.slots[name]).start : s.stop].view(s.shape) for name in fresh}
        known, first = ([name for name in fresh if (name in self._arrived) == is_known] for is_known in (True, False))
        if known:
            torch._foreach_add_([views[name] for name in known], [fresh[name] for name in known])
        if first:
            torch._foreach_copy_([views[name] for name in first], [fresh[name] for name in first])
        self._arrived.update(first)

    def _sum_of(self, unit: Unit) -> torch.Tensor:
        if unit.name not in self._sums:
            is_sum = self._axis.group is not None or not self._single
            dtype = self._dtype if is_sum else self._arriving_dtype
            # What is taken ahead holds the last step's gradient until the host has fetched it: only gaps are written.
            new = torch.empty if unit in self._ahead else torch.zeros
            total = self._sums[unit.name] = new(unit.length, dtype=dtype, device=self.shard.device)
            for start, stop in unit.gaps() if unit in self._ahead else ():
                total[start:stop].zero_()
        return self._sums[unit.name]

    @torch.no_grad()
    def _reduce(self, unit: Unit, last: bool) -> None:
        total = self._sum_of(unit)
        for name, slot in unit.slots.items():
            if name not in self._arrived:
                total[slot.start : slot.stop].zero_()
        sent = total if self._axis.group is None else total.to(self._reduce_dtype)
        if self._axis.shards > 1:
            into = torch.empty(unit.shard_length, dtype=sent.dtype, device=sent.device)
            work = reduce_scatter_single(into, sent, group=self._axis.group, async_op=True)
            self._pending.append((self._settled_after(work, unit, into, last), (sent, into)))
        elif self._axis.group is not None:
            work = dist.all_reduce(sent, group=self._axis.group, async_op=True)
            self._pending.append((self._settled_after(work, unit, sent, last), (sent,)))
        else:
            self._settle(unit, sent, last)
        if not self._keeps_all:
            self._arrived.difference_update(unit.slots)
        if not self._keeps_all or (self._single and unit.name not in self._fixed):
            del self._sums[unit.name]
        if not self._keeps_all or self._streams:
            while len(self._pending) > MOST_IN_FLIGHT:
                self._complete_one()
        self._done(unit.name)

    def _settled_after(self, work: Any, unit: Unit, part: torch.Tensor, last: bool) -> Callable[[], None]:
        """Take what a reduction brings when it is there, at the latest when the result is called.

        What the host waits for is not queued behind the layers of which the backward pass is already launched.
        """
        if self._aside is None:

            def settle() -> None:
                work.wait()
                self._settle(unit, part, last)

            return settle
        with torch.cuda.stream(self._aside):
            work.wait()
            self._settle(unit, part, last)
            settled = self._aside.record_event()
        return lambda: torch.cuda.current_stream().wait_event(settled)

    def _settle(self, unit: Unit, part: torch.Tensor, last: bool) -> None:
        """Take what the reduction has brought: the whole sum's shard, or under ZeRO-2 and 3 that of one micro-batch."""
        shard = self.shards[unit.name]
        stays = shard.numel() == unit.shard_length
        if not self._keeps_all and not self._single:
            total = shard if stays else self._total_of(unit)
            # A new sum begins here and not with the step: the CPU may still be reading the last one until it has
            # updated this unit, and the forward pass has waited for that.
            part = total.add_(part) if unit.name in self._summed else total.copy_(part)
            self._summed.add(unit.name)
        if not last:
            return
        if not stays:
            assert self._to_host is not None
            self._to_host(unit, part, shard)
        elif part.data_ptr() != shard.data_ptr():
            shard.copy_(part)

    def _total_of(self, unit: Unit) -> torch.Tensor:
        """This process's shard of the sum over micro-batches, of a unit that the host updates."""
        if unit.name not in self._totals:
            self._totals[unit.name] = torch.empty(unit.shard_length, dtype=self._dtype, device=self.shard.device)
        return self._totals[unit.name]

    def _complete_one(self) -> None:
        complete, _in_use = self._pending.popleft()  # until then other streams read or write these
        complete()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until this process's shard of the sum is complete."""
        while self._pending:
            self._complete_one()
