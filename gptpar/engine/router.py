"""Sums final gradients over the tensor axis, and routes them to the device's optimizer and to the subscriber."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.ranges import Home
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.optim.grad_norm import GradientNorm, Measured
from gptpar.topology.mesh import TENSOR


class GradientRouter:
    """Sums gradients over the tensor axis, measures their norm, and divides them between device and subscriber.

    Sums and norms are formed over a unit's whole shard before it is divided. So neither the norm nor the gradient
    depends on the twin-flow ratio. No number format changes here.

    Units that the device updates wholly are completed together at the end of the step, others when they are routed.

    Args:
        table: of this process's parameters.
        tensor_group: the ranks that split each layer; ``None`` when alone.
        tied: units that other stages have, too, with the group that sums their gradients at the end of the step.
        subscriber: updates the elements that the device does not; ``None``: their gradients are dropped.
        counts_zeros: whether zeros are counted.

    Attributes:
        divides: whether any unit has elements for the subscriber, which gets them during the backward pass.
    """

    def __init__(
        self,
        table: ParameterTable,
        memory: GradientMemory,
        tensor_group: dist.ProcessGroup | None,
        tied: Mapping[str, dist.ProcessGroup],
        subscriber: Subscriber | None,
        graph_breaks: GraphBreaks,
        *,
        counts_zeros: bool,
    ):
        self._table, self._memory, self._tensor_group, self._tied = table, memory, tensor_group, tied
        self._subscriber, self._graph_breaks, self._counts_zeros = subscriber, graph_breaks, counts_zeros
        self._messages = {unit.name: table.messages(unit.name, TENSOR) for unit in table.units}
        self._norm = GradientNorm({unit.name: table.counted(unit.name) for unit in table.units})
        self._held_back: dict[str, tuple[Unit, torch.Tensor]] = {}
        self._zeros = torch.zeros((), dtype=torch.float64, device=memory.shard.device)
        self.divides = len(memory.undivided) < len(table.units)

    def begin(self) -> None:
        """A step begins."""
        self._zeros.zero_()

    def route(self, unit: Unit, shard: torch.Tensor) -> None:
        """This process's shard of a unit's gradient is final over the data axis.

        The subscriber's elements of ``shard`` must not change until the unit's next backward pass.
        """
        on_device = self._memory.shards[unit.name]
        if on_device.numel() == unit.shard_length:
            if shard is not on_device:
                on_device.copy_(shard)
        elif unit.name in self._tied:
            self._held_back[unit.name] = (unit, shard)
        else:
            self._divide(unit, shard)

    @torch.no_grad()
    def finish(self) -> None:
        """All units were routed: complete those that wait for the end of the step."""
        shards = self._undivided
        sum_together([part for unit in shards for part in self._addends(unit, shards[unit])], self._tensor_group)
        for name, group in self._tied.items():
            held = self._held_back.pop(name, None)
            # Sum the whole shard: the stages that have the unit may divide it at different elements.
            sum_together([self._memory.shards[name] if held is None else held[1]], group)
            if held is not None:
                self._divide(*held)

    def square(self) -> torch.Tensor:
        """Sum of squares (fp64 scalar on the device) of the elements that this process counts."""
        self._norm.take(self._norm.measured(self._undivided))
        return self._norm.square(self._memory.shard.device)

    def squares(self) -> torch.Tensor:
        """[units] that :meth:`square`, which comes first in a step, unit by unit."""
        return self._norm.squares(self._memory.shard.device)

    def replace(self, unit: Unit, shard: torch.Tensor) -> None:
        """Use another final gradient of a unit, before :meth:`square`; other processes that hold the shard do so, too.

        Args:
            shard: [unit.shard_length] new memory; its sums over all axes are formed.
        """
        on_device = self._memory.shards[unit.name]
        if on_device.numel() == unit.shard_length:
            on_device.copy_(shard)
        else:
            self._give_out(unit, shard)

    @property
    def zeros(self) -> torch.Tensor:
        """How many of the subscriber's elements that this process counts are zero (fp64 scalar on the device)."""
        return self._zeros

    @property
    def _undivided(self) -> dict[str, torch.Tensor]:
        return {unit.name: self._memory.shards[unit.name] for unit in self._memory.undivided}

    def _addends(self, unit: str, shard: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a unit's gradient that are still to be summed over the tensor axis."""
        return [shard[start:stop] for start, stop in self._messages[unit]]

    @torch.no_grad()
    def _divide(self, unit: Unit, shard: torch.Tensor) -> None:
        sum_together(self._addends(unit.name, shard), self._tensor_group)
        self._give_out(unit, shard)

    def _give_out(self, unit: Unit, shard: torch.Tensor) -> None:
        """Measure a shard whose sums are formed, and give device and subscriber their elements."""
        norms = self._norm.measured({unit.name: shard})
        on_device = self._memory.shards[unit.name]
        low = on_device.numel()
        if low:
            on_device.copy_(shard[:low])
        if self._counts_zeros:
            self._count_zeros(unit, shard)
        # Each replay hands over the recording's norms anew: steps launched since have put their own in their place.
        self._graph_breaks.at(partial(self._hand_over, unit.name, norms, shard[low:]))

    def _hand_over(self, unit: str, norms: Measured, offloaded: torch.Tensor) -> None:
        self._norm.take(norms)
        if self._subscriber is not None:
            self._subscriber.submit_gradient(unit, offloaded)

    def _count_zeros(self, unit: Unit, shard: torch.Tensor) -> None:
        for one in self._table.ranges(unit=unit.name, home=Home.HOST):
            if one.counted:
                self._zeros += (shard[one.start : one.stop] == 0).sum()


def sum_together(parts: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each part over a group, in one message; ``None``: this process is alone in the group."""
    if group is not None and any(part.numel() for part in parts):
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))
