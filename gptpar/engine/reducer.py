"""Sums gradients over the processes that share a unit, and divides final ones between device and subscriber."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.ranges import Home
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.units import Unit
from gptpar.optim.grad_norm import GradientNorm, Measured
from gptpar.topology.groups import reduce_scatter_single
from gptpar.topology.mesh import TENSOR

MAX_IN_FLIGHT = 2
"""Number of reductions that may hold a whole unit's buffer at once, under ZeRO-2 and 3 or with a subscriber."""


@dataclass(frozen=True)
class _Reduction:
    """A reduction that has begun.

    Attributes:
        wait: makes its result usable on the current stream.
        add: adds the result to the unit's sum.
        in_use: other streams use these tensors until the result is usable.
    """

    wait: Callable[[], None]
    add: Callable[[], None]
    in_use: tuple[torch.Tensor, ...]


class GradientReducer:
    """Reduces each unit's gradient to this process's shard, and divides the final shard between device and subscriber.

    A unit's gradient is summed over the processes that hold copies of it while the backward pass still runs, a limited
    number at a time, and then over the tensor axis. The norm is measured, and the shard divided. Sums and norms are
    formed over a unit's whole shard before it is divided: so neither the norm nor the gradient depends on the twin-flow
    ratio. Units that the device updates wholly are completed together at the end of the step, others as soon as they
    are final over the data axis. The state of a step:

    ================  ==============================================================================================
    ``_pending``      reductions that have begun and are not added to their sums, the oldest first; empty after
                      :meth:`finish`
    ``_summed``       units whose sum over micro-batches has begun in this step, where shards are added up or the
                      subscriber sums
    ``_held_back``    tied units with elements of the subscriber, with final shards, until :meth:`finish` sums these
                      over the stages
    ``_norms``        the norms of units whose gradient is final
    ================  ==============================================================================================

    Args:
        dtype: number format in which processes exchange gradients.
        subscriber: updates the elements that the device does not; ``None``: their gradients are dropped.
        graph_breaks: where the subscriber gets them, between the launches of a step.
        tied: units that other stages have, too, with the group that sums their gradients at the end of the step.
        counts_zeros: whether zeros are counted.

    Attributes:
        memory: as given.
        has_begun: whether any reduction over processes has begun in this step.
        zeros: how many of the subscriber's elements that this process counts are zero (fp64 scalar on the device).
    """

    def __init__(
        self,
        memory: GradientMemory,
        dtype: torch.dtype,
        subscriber: Subscriber | None,
        graph_breaks: GraphBreaks,
        tied: Mapping[str, dist.ProcessGroup] | None = None,
        counts_zeros: bool = False,
    ):
        self.memory, self._dtype, self._tied = memory, dtype, tied or {}
        table, data = memory.table, memory.data
        self._tensor_group = data.groups.get((TENSOR,))
        self._subscriber, self._graph_breaks, self._counts_zeros = subscriber, graph_breaks, counts_zeros
        self._sums = None if subscriber is None else subscriber.sums
        self.has_begun = False
        self._pending: deque[_Reduction] = deque()
        self._summed: set[str] = set()
        self._held_back: dict[str, tuple[Unit, torch.Tensor]] = {}
        self._final_before: dict[str, Sequence[tuple[int, torch.Tensor]]] = {}
        self._messages = {unit.name: table.messages(unit.name, TENSOR) for unit in table.units}
        self._norm = GradientNorm({unit.name: table.counted(unit.name) for unit in table.units})
        self._norms: Measured = {}
        self.zeros = torch.zeros((), dtype=torch.float64, device=memory.shard.device)
        divides = len(memory.undivided) < len(table.units)  # the subscriber gets its elements in the backward pass
        self._bounded = data.zero_stage >= 2 or divides
        on_side_stream = divides and not data.is_alone and memory.shard.is_cuda
        self._side_stream = torch.cuda.Stream(memory.shard.device) if on_side_stream else None

    def begin(self) -> None:
        """Begin a step; reductions of a step that was dropped write no more, and are not added."""
        self.zeros.zero_()
        while self._pending:
            dropped = self._pending.popleft()  # holds the tensors until they are usable
            dropped.wait()
        self._summed.clear()
        self._final_before.clear()
        self.has_begun = False

    def reopen(self, final: Mapping[str, Sequence[tuple[int, torch.Tensor]]]) -> None:
        """Begin sums anew within a step; to each that is final again, its unit's former final gradient is added.

        Args:
            final: unit -> (first element in its shard, values in fp32 or wider), on device or host.
        """
        assert self._tensor_group is None and not self._tied, "a former final gradient would be summed over them twice"
        self._summed.clear()
        self._final_before = dict(final)

    def reduce(self, unit: Unit, total: torch.Tensor, *, last: bool) -> None:
        """Begin to sum a unit's gradient over the processes that hold copies of it; under ``torch.no_grad()``.

        Args:
            total: [unit.length] this process's sum.
            last: whether the reduced sum is final.
        """
        group = self.memory.data.groups.get(unit.copies_over)
        self.has_begun |= group is not None
        sent = total if group is None else total.to(self._dtype)
        if group is None:
            self._add(unit, sent, last)
        elif unit.shards > 1:
            into = torch.empty(unit.shard_length, dtype=sent.dtype, device=sent.device)
            work = reduce_scatter_single(into, sent, group=group, async_op=True)
            self._pending.append(self._begun(work, unit, into, last, (sent, into)))
        else:
            work = dist.all_reduce(sent, group=group, async_op=True)
            self._pending.append(self._begun(work, unit, sent, last, (sent,)))
        while self._bounded and len(self._pending) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def _begun(
        self, work: Any, unit: Unit, shard: torch.Tensor, last: bool, in_use: tuple[torch.Tensor, ...]
    ) -> _Reduction:
        """A reduction that has begun. With a subscriber, a side stream waits for it and passes the shard on.

        On the current stream this would be queued behind the layers that have been launched meanwhile.
        """
        if self._side_stream is None:
            return _Reduction(partial(self.memory.data.wait_for, work), partial(self._add, unit, shard, last), in_use)
        with torch.cuda.stream(self._side_stream):
            self.memory.data.wait_for(work)
            self._add(unit, shard, last)
            there = self._side_stream.record_event()
        return _Reduction(lambda: torch.cuda.current_stream().wait_event(there), lambda: None, in_use)

    def _add(self, unit: Unit, shard: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's shard to the earlier ones, unless micro-batches are added before the reduction."""
        if unit.name in self.memory.summed_on_host:
            self._add_on_host(unit, shard, last)
            return
        if not (self.memory.single or unit.name in self.memory.kept_whole):
            total = self.memory.shard_sum_of(unit)
            # A new sum begins here and not with the step: the subscriber may read the last step's sum until it has
            # updated the unit. By now it has, because the unit's forward pass waited for the update.
            shard = total.add_(shard) if unit.name in self._summed else total.copy_(shard)
            self._summed.add(unit.name)
        if last:
            before = self._final_before.get(unit.name)
            self._complete(unit, shard if before is None else sum_with(before, shard))

    def _add_on_host(self, unit: Unit, shard: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's shard where the subscriber sums its own elements."""
        on_device, first = self.memory.shards[unit.name], unit.name not in self._summed
        self._summed.add(unit.name)
        sum_together(self._addends(unit.name, shard), self._tensor_group)
        if low := on_device.numel():
            (on_device.copy_ if first else on_device.add_)(shard[:low])
        if self._sums is not None:
            self._sums.add(unit.name, shard[low:], first=first, last=last)

    def _complete(self, unit: Unit, shard: torch.Tensor) -> None:
        """Use this process's shard of a unit's gradient, which is final over the data axis.

        The subscriber's elements of ``shard`` must not change until the unit's next backward pass.
        """
        on_device = self.memory.shards[unit.name]
        if on_device.numel() == unit.shard_length:
            if shard is not on_device:
                on_device.copy_(shard)
        elif unit.name in self._tied:
            self._held_back[unit.name] = (unit, shard)
        else:
            self._divide(unit, shard)

    def _finish_oldest(self) -> None:
        oldest = self._pending.popleft()
        oldest.wait()
        oldest.add()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reductions after all passes, and complete the units that wait for the end of the step."""
        while self._pending:
            self._finish_oldest()
        self._final_before.clear()
        shards = self._undivided
        sum_together([part for unit in shards for part in self._addends(unit, shards[unit])], self._tensor_group)
        for name, group in self._tied.items():
            held = self._held_back.pop(name, None)
            # The whole shard is summed and then divided, as for other units: the ratio changes no sum.
            sum_together([self.memory.shards[name] if held is None else held[1]], group)
            if held is not None:
                self._divide(*held)

    def square(self) -> torch.Tensor:
        """Sum of squares (fp64 scalar on the device) of the elements that this process counts."""
        self._norms |= self._norm.measured(self._undivided)
        if self._sums is not None:
            self._norms |= self._norm.measured_apart(self.memory.shards, self._sums.squares())
        return self._norm.square(self._norms, self.memory.shard.device)

    def squares(self) -> torch.Tensor:
        """[units] the addends of :meth:`square`, one for each unit; a step calls :meth:`square` first."""
        return self._norm.squares(self._norms, self.memory.shard.device)

    def replace(self, unit: Unit, shard: torch.Tensor) -> None:
        """Use another final gradient of a unit, before :meth:`square`; other processes that hold the shard do so, too.

        Args:
            shard: [unit.shard_length] new memory; its sums over all axes are formed.
        """
        on_device = self.memory.shards[unit.name]
        if on_device.numel() == unit.shard_length:
            on_device.copy_(shard)
        else:
            self._give_out(unit, shard)

    @property
    def _undivided(self) -> dict[str, torch.Tensor]:
        return {unit.name: self.memory.shards[unit.name] for unit in self.memory.undivided}

    def _addends(self, unit: str, shard: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a unit's gradient that are still to be summed over the tensor axis."""
        return [shard[start:stop] for start, stop in self._messages[unit]]

    def _divide(self, unit: Unit, shard: torch.Tensor) -> None:
        if self._tensor_group is not None:
            sum_together(self._addends(unit.name, shard), self._tensor_group)
        self._give_out(unit, shard)

    def _give_out(self, unit: Unit, shard: torch.Tensor) -> None:
        """Measure a shard whose sums are formed, and give device and subscriber their elements."""
        norms = self._norm.measured({unit.name: shard})
        on_device = self.memory.shards[unit.name]
        low = on_device.numel()
        if low:
            on_device.copy_(shard[:low])
        for one in self.memory.table.ranges(unit=unit.name, home=Home.HOST) if self._counts_zeros else ():
            if one.counted:
                self.zeros += (shard[one.start : one.stop] == 0).sum()
        # Each replay hands over the recording's norms anew: steps launched since have put their own in their place.
        self._graph_breaks.at(partial(self._hand_over, unit.name, norms, shard[low:]))

    def _hand_over(self, unit: str, norms: Measured, offloaded: torch.Tensor) -> None:
        self._norms |= norms
        if self._subscriber is not None:
            self._subscriber.submit_gradient(unit, offloaded)


def sum_with(parts: Sequence[tuple[int, torch.Tensor]], shard: torch.Tensor) -> torch.Tensor:
    """A shard, in new memory, with each of the parts, (first element, values), added to its elements."""
    total = shard.to(parts[0][1].dtype, copy=True) if parts else shard
    for start, values in parts:
        total[start : start + values.numel()] += values.to(total.device)
    return total


def sum_together(parts: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each part over a group, in one message; ``None``: this process is alone in the group."""
    if group is not None and any(part.numel() for part in parts):
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))
