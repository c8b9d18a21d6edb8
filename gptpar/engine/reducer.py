"""Sums gradients over the copies of their unit while the backward pass still runs, a limited number at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gptpar.engine.data_axes import DataAxes
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.router import GradientRouter
from gptpar.engine.units import Unit
from gptpar.topology.groups import reduce_scatter_single

MAX_IN_FLIGHT = 2
"""Under ZeRO-2 and 3, the number of reductions that may hold a whole unit's buffer at once."""


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
    """Reduces each unit's gradient to this process's shard, and hands the final shard on to the router.

    Args:
        dtype: number format in which processes exchange gradients.

    Attributes:
        has_begun: whether any reduction over processes has begun in this step.
    """

    def __init__(self, memory: GradientMemory, data: DataAxes, dtype: torch.dtype, router: GradientRouter):
        self._memory, self._data, self._dtype, self._router = memory, data, dtype, router
        self._summed: set[str] = set()
        self.has_begun = False
        self._pending: deque[_Reduction] = deque()
        self._bounded = data.zero_stage >= 2 or router.divides
        on_side_stream = router.divides and not data.is_alone and memory.shard.is_cuda
        self._side_stream = torch.cuda.Stream(memory.shard.device) if on_side_stream else None

    def begin(self) -> None:
        """A step begins; reductions of a step that was dropped write no more, and are not added."""
        while self._pending:
            dropped = self._pending.popleft()  # holds the tensors until they are usable
            dropped.wait()
        self._summed.clear()
        self.has_begun = False

    @torch.no_grad()
    def reduce(self, unit: Unit, total: torch.Tensor, *, last: bool) -> None:
        """Begin to sum a unit's gradient over the processes that hold copies of it.

        Args:
            total: [unit.length] this process's sum.
            last: whether the reduced sum is final.
        """
        group = self._data.group(unit)
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
        self._memory.release(unit)
        while self._bounded and len(self._pending) > MAX_IN_FLIGHT:
            self._complete_one()

    def _begun(
        self, work: Any, unit: Unit, shard: torch.Tensor, last: bool, in_use: tuple[torch.Tensor, ...]
    ) -> _Reduction:
        """A reduction, which a subscriber's shard leaves on a side stream.

        On the current stream it would be queued behind the layers that have been launched meanwhile.
        """
        if self._side_stream is None:
            return _Reduction(partial(self._data.wait_for, work), partial(self._add, unit, shard, last), in_use)
        with torch.cuda.stream(self._side_stream):
            self._data.wait_for(work)
            self._add(unit, shard, last)
            there = self._side_stream.record_event()
        return _Reduction(lambda: torch.cuda.current_stream().wait_event(there), lambda: None, in_use)

    def _add(self, unit: Unit, shard: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's shard to the earlier ones, unless micro-batches are added before the reduction."""
        if not (self._memory.single or self._memory.keeps_sum(unit)):
            total = self._memory.shard_sum_of(unit)
            # A new sum begins here and not with the step: the subscriber may read the last step's sum until it has
            # updated the unit. By now it has, because the unit's forward pass waited for the update.
            shard = total.add_(shard) if unit.name in self._summed else total.copy_(shard)
            self._summed.add(unit.name)
        if last:
            self._router.route(unit, shard)

    def _complete_one(self) -> None:
        oldest = self._pending.popleft()
        oldest.wait()
        oldest.add()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until this process's shards are complete."""
        while self._pending:
            self._complete_one()
