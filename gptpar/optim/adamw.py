"""AdamW that owns fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from gptpar.config import OptimizerConfig
from gptpar.optim.buckets import Rates
from gptpar.optim.host_share import HostShare
from gptpar.optim.runs import DECAYS, DECAYS_NOT, Division, Run, counted
from gptpar.pipeline.stage import ParameterInfo
from gptpar.tensor_parts import TensorParts, parts_of_flat
from gptpar.zero.units import Unit

ROW = 64


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over this process's shard of the master weights.

    The device's elements are updated by torch's fused kernel: clipping, the loss scale and the skipping of non-finite
    gradients happen inside it, without waiting for the device. The others are the host's.

    Args:
        units: all units of this process, in forward order.
        infos: what is known of each parameter.
        division: which elements of each unit's shard are the device's.
        runs: how stretches of the device's elements are treated.
        shard: which shard of each unit is this process's.
        grad: the gradient sum of the device's elements of all units in a row, fp32 or wider.
        config: betas, epsilon and clipping.
        host: updates the other elements; ``None`` where there are none.

    Attributes:
        masters: unit -> the device's piece of the master weights.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        infos: Mapping[str, ParameterInfo],
        division: Division,
        runs: Sequence[Run],
        shard: int,
        grad: torch.Tensor,
        config: OptimizerConfig,
        host: HostShare | None = None,
    ):
        self.clip_grad, self.grad, self.host = config.clip_grad, grad, host
        self._units, self._infos, self._shard, self._runs = units, infos, shard, runs
        self._on_device = division.on_device
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(grad) for _ in range(3))
        lengths = [self._on_device[unit.name] for unit in units]
        self.masters = {u.name: piece for u, piece in zip(units, self.master.split(lengths), strict=True)}
        self._betas, self._eps = (config.adam_beta1, config.adam_beta2), config.adam_eps
        of_group = [[run for run in runs if run.group == group] for group in (DECAYS, DECAYS_NOT)]
        groups = [{"params": [self._leaf(r) for r in of_group[n]], "group": n} for n in (DECAYS, DECAYS_NOT)]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=self._betas, eps=self._eps, fused=True
        )
        leaves = (run for group in of_group for run in group)
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for parameter, run in zip(parameters, leaves, strict=True):
            self.inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=grad.device),
                "exp_avg": self.exp_avg[run.start : run.stop],
                "exp_avg_sq": self.exp_avg_sq[run.start : run.stop],
            }

    def _leaf(self, run: Run) -> torch.Tensor:
        flat = self.master[run.start : run.stop].detach().requires_grad_()
        flat.grad = self.grad[run.start : run.stop]
        return flat

    def square_of_grad(self) -> torch.Tensor:
        """Sum of squares (fp64) of the device's gradient elements that this process counts."""
        return square_of([self.grad[start:stop] for start, stop in counted(self._runs)], self.grad.device)

    def square_of_weights(self) -> torch.Tensor:
        """Sum of squares (fp64) of the master weights that this process counts, the host's too."""
        square = square_of([self.master[start:stop] for start, stop in counted(self._runs)], self.grad.device)
        return square if self.host is None else square + self.host.square_of_weights()

    def zeros_in_grad(self) -> int:
        """Zeros among the device's gradient elements that this process counts."""
        mask = torch.zeros_like(self.grad, dtype=torch.bool)
        for start, stop in counted(self._runs):
            mask[start:stop] = True
        places = [(view, mask[at : at + view.numel()]) for _, _, view, at in self._held("grad") if at is not None]
        return sum(int(((view == 0) & counts).sum()) for view, counts in places)

    @torch.no_grad()
    def step(self, norm: torch.Tensor, lr: float, weight_decay: float, loss_scale: float) -> torch.Tensor:
        """Update the masters from the gradient sum.

        Args:
            norm: L2 norm of the whole model's gradient before clipping, without the loss scale (fp64 scalar).
            lr: this step's learning rate.
            weight_decay: this step's decoupled decay, for the parameters that have one.
            loss_scale: what the gradient sum is to be divided by.

        Returns:
            1.0 where the gradient was not finite and nothing was changed, else 0.0, on the device.
        """
        rates = self._rates(lr, weight_decay)
        if self.host is not None:  # first: it learns the norm before the device has updated its own elements
            self.host.step(norm, rates, loss_scale)
        finite = norm.isfinite()
        skipped = (~finite).float()
        divisor = divisor_of(norm, loss_scale, self.clip_grad)
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = lr, rates[group["group"]].weight_decay
        if self.grad.dtype == torch.float64:  # the fused kernel divides by an fp32 number
            self.grad /= divisor.where(finite, 1.0)  # 0 / NaN would spoil the gaps between parameters for good
            divisor = torch.ones_like(divisor)
        self.inner.grad_scale, self.inner.found_inf = divisor.float(), skipped  # type: ignore[attr-defined]
        self.inner.step()
        return skipped

    def foresee(self, lr: float, weight_decay: float, loss_scale: float) -> None:
        """What :meth:`step` will probably be called with: the host may begin during the backward pass."""
        if self.host is not None:
            self.host.foresee(self._rates(lr, weight_decay), loss_scale)

    def _rates(self, lr: float, weight_decay: float) -> tuple[Rates, Rates]:
        """By group."""
        decays, decays_not = (Rates(lr, *self._betas, self._eps, decay) for decay in (weight_decay, 0.0))
        return decays, decays_not

    def state_tensors(self) -> dict[str, dict[str, TensorParts]]:
        """Live views for a checkpoint: ``weights``, ``exp_avg`` and ``exp_avg_sq``, each by global parameter name."""
        return {kind: self.parts(kind) for kind in ("weights", "exp_avg", "exp_avg_sq")}

    def parts(self, kind: str) -> dict[str, TensorParts]:
        """The parameters' pieces here, on device and host, of one kind of state or of the gradient (``grad``).

        The host's gradients are there between the end of the backward pass and the step.
        """
        found: dict[str, TensorParts] = {}
        for name, first, view, _ in self._held(kind):
            info = self._infos[name]
            more = parts_of_flat(info.full_shape, info.shape, info.offsets, first, first + view.numel(), view)
            if name in found:
                more = TensorParts(more.shape, found[name].parts + more.parts, more.dtype)
            found[name] = more
        return found

    def _held(self, kind: str) -> Iterator[tuple[str, int, torch.Tensor, int | None]]:
        """(parameter, its first element held, their values, their place in the device's buffers or ``None``)"""
        of_unit = {unit.name: unit for unit in self._units}
        buffer = {"weights": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "grad": self.grad}[
            kind
        ]
        base = 0
        for unit in self._units:
            length = self._on_device[unit.name]
            for name, first, start, stop in unit.held_between(self._shard, 0, length):
                yield name, first, buffer[base + start : base + stop], base + start
            base += length
        for name_of_unit, at, values in self.host.parts(kind) if self.host is not None else ():
            unit, low = of_unit[name_of_unit], self._on_device[name_of_unit] + at
            for name, first, start, stop in unit.held_between(self._shard, low, low + values.numel()):
                yield name, first, values[start - low : stop - low], None

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted (reading it waits for the device)."""
        return int(next(iter(self.inner.state.values()))["step"].item())

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        for state in self.inner.state.values():
            state["step"].fill_(count)
        if self.host is not None:
            self.host.steps_taken = count


def divisor_of(norm: torch.Tensor, loss_scale: float, max_norm: float) -> torch.Tensor:
    """What gradients are divided by, so that their norm without the loss scale is at most ``max_norm`` (0: any)."""
    divisor = torch.full_like(norm, loss_scale)
    return divisor * ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else divisor


def square_of(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares (fp64) of some vectors' elements, 16-bit ones summed in fp32."""
    return square_of_norms(norms_of(pieces), device)


def norms_of(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Vectors of norms (fp32 or wider) of stretches of some vectors, for :func:`square_of_norms`."""
    if not pieces:
        return []
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if pieces[0].is_cuda:
        return [norm[None] for norm in torch._foreach_norm(list(pieces), 2, dtype=wide)]
    # Summed by rows first: over a long fp32 vector torch's CPU kernel drifts (6 % at 350M elements).
    norms: list[torch.Tensor] = []
    for piece in pieces:
        whole = piece.numel() // ROW * ROW
        norms.append(torch.linalg.vector_norm(piece[:whole].view(-1, ROW), dim=1, dtype=wide))
        norms.append(torch.linalg.vector_norm(piece[whole:], dtype=wide)[None])
    return norms


def square_of_norms(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares (fp64) of what some vectors hold."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.cat(list(norms)), dtype=torch.float64).square()
