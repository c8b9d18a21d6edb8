"""The way of complete gradients to the host's share of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from gptpar.optim.adamw import norms_of, square_of_norms
from gptpar.optim.buckets import HostPiece
from gptpar.optim.runs import counted
from gptpar.tensor_parallel import TensorAxis
from gptpar.training.step_graph import HostCalls
from gptpar.zero.units import Unit


class HostGradients:
    """Completes, measures and sends what the host updates of each unit's gradient, as soon as it is there.

    Args:
        host: the receiver; ``None``: what comes is dropped.
        pieces: the host's elements by unit.
        low: unit -> how many elements of its shard come before these.
        shard: which shard of each unit is this process's.
        late: units whose gradient is complete only at the end of the step, because another stage adds to it.
        dtype: of the parameters.
        counts_zeros: whether zeros are counted.
        ahead: see :class:`~gptpar.zero.gradients.GradientSum`.

    Attributes:
        square: sum of squares of the elements that this process counts (fp64, on the device), after :meth:`end`.
        zeros: how many of them are zero (fp64, on the device).
    """

    def __init__(
        self,
        host: HostCalls | None,
        pieces: Sequence[HostPiece],
        low: Mapping[str, int],
        shard: int,
        tensor: TensorAxis,
        late: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        counts_zeros: bool,
        ahead: bool = False,
    ):
        self._host, self._low, self._shard, self._tensor = host, low, shard, tensor
        self._pieces = {piece.unit: piece for piece in pieces}
        self._late, self._dtype, self._travels, self._counts_zeros = late, dtype, dtype, counts_zeros
        self._held_back: dict[str, tuple[Unit, torch.Tensor]] = {}
        self._counted = {piece.unit: counted(piece.runs) for piece in pieces}
        self._norms: list[torch.Tensor] = []
        self._ahead, self._narrow = ahead, dict[str, torch.Tensor]()
        self.square, self.zeros = torch.zeros(2, dtype=torch.float64, device=device)

    def begin(self, num_addends: int) -> None:
        """A step begins, whose gradient is the sum of so many."""
        self._norms.clear()
        self.zeros.zero_()
        summed = torch.bfloat16 if self._dtype == torch.float16 else self._dtype  # sums would not fit fp16's range
        self._travels = self._dtype if num_addends == 1 else summed
        if self._ahead and num_addends > 1:
            device = self.square.device
            for name, piece in self._pieces.items():
                self._narrow[name] = torch.empty(piece.length, dtype=self._travels, device=device)

    def take(self, unit: Unit, grad: torch.Tensor) -> None:
        """The host's part of a unit's gradient, summed over micro-batches and data-parallel processes."""
        if unit.name in self._late:
            self._held_back[unit.name] = (unit, grad)
        else:
            self._send(unit, grad)

    @torch.no_grad()
    def take_early(self, unit: Unit, grad: torch.Tensor, part: slice, addend: torch.Tensor | None) -> None:
        """Nearly what :meth:`take` will get: it differs in the rows that the host has been told of.

        Args:
            part: what is formed of it, after the parts before.
            addend: what is to be added to that; ``grad`` itself, a sum that is not complete, stays as it is.
        """
        if addend is not None:
            if unit.name not in self._narrow:
                self._narrow[unit.name] = torch.empty_like(grad, dtype=self._travels)
            torch.add(grad[part], addend, out=self._narrow[unit.name][part])
            grad = self._narrow[unit.name]
        if self._host is not None:
            self._host.offer(unit.name, grad, formed=part.stop)

    def end(self) -> None:
        """The step's gradients are complete."""
        self.square.copy_(square_of_norms(self._norms, self.square.device))

    def finish(self, unit: str, device_part: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum a late unit's gradient over the stages that share it, the device's part of it too.

        Both in one: the stages may divide it differently between device and host.
        """
        held = self._held_back.pop(unit, None)
        sum_together([device_part] if held is None else [device_part, held[1]], group)
        if held is not None:
            self._send(*held)

    @torch.no_grad()
    def _send(self, unit: Unit, grad: torch.Tensor) -> None:
        if self._host is None:
            return
        runs = self._pieces[unit.name].runs
        if self._tensor.splits_tokens:  # a whole parameter has seen this rank's tokens only
            sum_together([grad[run.start : run.stop] for run in runs if run.replicated], self._tensor.group)
        self._norms += norms_of([grad[start:stop] for start, stop in self._counted[unit.name]])
        if self._counts_zeros:
            low = self._low[unit.name]
            for first, last in self._counted[unit.name]:
                for *_, start, stop in unit.held_between(self._shard, low + first, low + last):
                    self.zeros += (grad[start - low : stop - low] == 0).sum()
        narrow = self._narrow.pop(unit.name, None)
        self._host.offer(unit.name, grad.to(self._travels) if narrow is None else narrow.copy_(grad))


def sum_together(pieces: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each piece over a group, in one message; processes may have cut the same elements differently."""
    if sum(piece.numel() for piece in pieces):
        flat = torch.cat(pieces)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
