"""The way of complete gradients to the host's share of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from gptpar.engine.step_graph import HostCalls
from gptpar.engine.units import Unit
from gptpar.optim.grad_norm import GradientNorm
from gptpar.optim.spans import HostPiece, Run, counted
from gptpar.placement import TENSOR
from gptpar.tensor_parallel import TensorAxis


class HostGradients:
    """Completes, measures and divides the gradient of units that have elements on the host, as soon as it is there.

    Everything that sums is done with a unit's whole shard before it is cut: neither the norm nor the gradient depends
    on where the cut is. Sums travel as they are; a gradient that comes once, in 16 bits, does so, too.

    Args:
        host: the receiver; ``None``: what comes is dropped.
        pieces: the host's elements by unit.
        norm: is told of each unit's gradient.
        shard: which shard of each unit is this process's.
        late: units whose gradient is complete only at the end of the step, because another stage adds to it.
        wide: dtype of sums.
        runs: unit -> the ranges of its whole shard.
        counts_zeros: whether zeros are counted.
        early: the unit whose gradient is offered early, if there is one.

    Attributes:
        zeros: how many of the host's elements that this process counts are zero (fp64, on the device).
    """

    def __init__(
        self,
        host: HostCalls | None,
        pieces: Sequence[HostPiece],
        norm: GradientNorm,
        shard: int,
        tensor: TensorAxis,
        late: Collection[str],
        wide: torch.dtype,
        device: torch.device,
        *,
        runs: Mapping[str, Sequence[Run]],
        counts_zeros: bool,
        early: Unit | None = None,
    ):
        self._host, self._shard, self._tensor, self._norm = host, shard, tensor, norm
        self._pieces = {piece.unit: piece for piece in pieces}
        self._summed = {unit: [run for run in its if TENSOR in run.grad_sums] for unit, its in runs.items()}
        self._late, self._wide, self._counts_zeros = late, wide, counts_zeros
        self._held_back: dict[str, tuple[Unit, torch.Tensor, torch.Tensor]] = {}
        self._early = None if early is None else self._pieces[early.name]
        self._early_sum = torch.empty(0)
        self.zeros = torch.zeros((), dtype=torch.float64, device=device)

    def begin(self, num_micro_batches: int) -> None:
        """A step begins."""
        self.zeros.zero_()
        if self._early is not None and num_micro_batches > 1:
            # Taken with the step, not when it is needed: a recorded step must use this memory for nothing else.
            self._early_sum = torch.empty(self._early.length, dtype=self._wide, device=self.zeros.device)

    def take(self, unit: Unit, grad: torch.Tensor, on_device: torch.Tensor) -> None:
        """A unit's gradient, summed over micro-batches and data-parallel processes.

        Args:
            grad: its whole shard.
            on_device: where the first elements go, which the device updates.
        """
        if unit.name in self._late:
            self._held_back[unit.name] = (unit, grad, on_device)
        else:
            self._divide(unit, grad, on_device)

    @torch.no_grad()
    def take_early(self, unit: Unit, grad: torch.Tensor, part: slice, addend: torch.Tensor | None) -> None:
        """The host's gradient before it is complete: rows that were announced as changing will still change.

        Args:
            part: what is formed of it, after the parts before.
            addend: what is to be added to that; ``grad`` itself, a sum that is not complete, stays as it is.
        """
        if addend is not None:
            torch.add(grad[part], addend, out=self._early_sum[part])
            grad = self._early_sum
        if self._host is not None:
            self._host.submit_gradient(unit.name, grad, formed=part.stop)

    def finish(self, unit: str, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum a late unit's gradient over the stages that share it.

        Args:
            shard: the gradient, if the device updates all of it; the stages may divide it differently.
        """
        held = self._held_back.pop(unit, None)
        sum_together([shard if held is None else held[1]], group)
        if held is not None:
            self._divide(*held)

    @torch.no_grad()
    def _divide(self, unit: Unit, grad: torch.Tensor, on_device: torch.Tensor) -> None:
        if summed := self._summed[unit.name]:
            sum_together([grad[run.start : run.stop] for run in summed], self._tensor.group)
        self._norm.measure({unit.name: grad})
        low = on_device.numel()
        on_device.copy_(grad[:low])
        if self._counts_zeros:
            self._count_zeros(unit, grad, low)
        if self._host is not None:
            self._host.submit_gradient(unit.name, grad[low:])

    def _count_zeros(self, unit: Unit, grad: torch.Tensor, low: int) -> None:
        for first, last in counted(self._pieces[unit.name].runs):
            for *_, start, stop in unit.held_between(self._shard, low + first, low + last):
                self.zeros += (grad[start:stop] == 0).sum()


def sum_together(pieces: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each piece over a group, in one message; ``None``: this process is alone on that axis."""
    if group is not None and any(piece.numel() for piece in pieces):
        flat = torch.cat(pieces)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
