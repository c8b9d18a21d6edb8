"""AdamW that owns fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gptpar.config import OptimizerConfig
from gptpar.pipeline.stage import ParameterInfo
from gptpar.tensor_parts import TensorParts, parts_of_flat
from gptpar.zero.units import ALIGNMENT, Unit


@dataclass(frozen=True)
class Run:
    """A stretch of this process's elements that are treated alike.

    Attributes:
        decays: whether weight decay applies.
        replicated: whether every tensor-parallel rank has the same elements.
        counted: whether this process counts them in sums over the model; of replicas, one does.
    """

    start: int
    stop: int
    decays: bool
    replicated: bool
    counted: bool


def make_runs(units: Sequence[Unit], shard: int, *, first_tensor_rank: bool, copies: frozenset[str]) -> list[Run]:
    """Stretches of all units' shards in a row, as long as possible.

    Args:
        shard: which shard of each unit is this process's.
        first_tensor_rank: whether this process counts what all tensor-parallel ranks have.
        copies: units that another stage counts.
    """
    runs: list[Run] = []
    base = 0
    for unit in units:
        for start, stop, decays, replicated in unit.runs(shard):
            counted = unit.name not in copies and (first_tensor_rank or not replicated)
            run = Run(base + start, base + stop, decays, replicated, counted)
            last = runs[-1] if runs else None
            if last and last.stop == run.start and _kind(last) == _kind(run):
                runs[-1] = Run(last.start, run.stop, *_kind(run))
            else:
                runs.append(run)
        base += unit.shard_length
    return runs or [Run(0, ALIGNMENT, False, False, False)]  # nothing but padding: the optimizer still counts steps


def _kind(run: Run) -> tuple[bool, bool, bool]:
    return run.decays, run.replicated, run.counted


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over this process's shard of the master weights.

    Clipping, the loss scale and the skipping of non-finite gradients happen inside torch's fused kernel, without
    waiting for the device.

    Args:
        units: all units of this process.
        infos: what is known of each parameter.
        runs: how stretches of the shard are treated.
        shard: which shard of each unit is this process's.
        grad: the gradient sum of all units' shards in a row, fp32 or wider.
        config: betas, epsilon and clipping.

    Attributes:
        masters: unit -> its piece of the master weights.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        infos: Mapping[str, ParameterInfo],
        runs: Sequence[Run],
        shard: int,
        grad: torch.Tensor,
        config: OptimizerConfig,
    ):
        self.clip_grad, self.grad = config.clip_grad, grad
        self._units, self._infos, self._shard, self._runs = units, infos, shard, runs
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(grad) for _ in range(3))
        lengths = [unit.shard_length for unit in units]
        self.masters = {u.name: piece for u, piece in zip(units, self.master.split(lengths), strict=True)}
        groups = [
            {"params": [self._leaf(r) for r in runs if r.decays is decays], "weight_decay": 0.0, "decays": decays}
            for decays in (True, False)
        ]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        leaves = (leaf for decays in (True, False) for leaf in [r for r in runs if r.decays is decays])
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

    def square_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum of squares (fp64) of the elements of a buffer like the master's that this process counts."""
        pieces = [buffer[start:stop] for start, stop in self._counted()]
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=buffer.device)
        if buffer.is_cuda:
            return torch.nn.utils.get_total_norm(pieces, foreach=True).double().square()
        # Summed by rows first: over a long fp32 vector torch's CPU kernel drifts (6 % at 350M elements).
        rows = [torch.linalg.vector_norm(piece.view(-1, ALIGNMENT), dim=1) for piece in pieces]
        return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).square()

    def _counted(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for run in self._runs:
            if run.counted and found and found[-1][1] == run.start:
                found[-1] = (found[-1][0], run.stop)
            elif run.counted:
                found.append((run.start, run.stop))
        return found

    def zeros_in_grad(self) -> int:
        """Zeros among the gradient elements that this process counts."""
        counted = torch.zeros_like(self.grad, dtype=torch.bool)
        for start, stop in self._counted():
            counted[start:stop] = True
        return sum(
            int(((self.grad[at : at + last - first] == 0) & counted[at : at + last - first]).sum())
            for _, first, last, at in self._held()
        )

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
        finite = norm.isfinite()
        skipped = (~finite).float()
        divisor = torch.full_like(norm, loss_scale)
        if self.clip_grad > 0:
            divisor = divisor * ((norm + 1e-6) / self.clip_grad).clamp(min=1.0)
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        if self.grad.dtype == torch.float64:  # the fused kernel divides by an fp32 number
            self.grad /= divisor.where(finite, 1.0)  # 0 / NaN would spoil the gaps between parameters for good
            divisor = torch.ones_like(divisor)
        self.inner.grad_scale, self.inner.found_inf = divisor.float(), skipped  # type: ignore[attr-defined]
        self.inner.step()
        return skipped

    def state_tensors(self) -> dict[str, dict[str, TensorParts]]:
        """Live views for a checkpoint: ``weights``, ``exp_avg`` and ``exp_avg_sq``, each by global parameter name."""
        buffers = {"weights": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {kind: self.parts_of(buffer) for kind, buffer in buffers.items()}

    def parts_of(self, buffer: torch.Tensor) -> dict[str, TensorParts]:
        """The parameters' pieces in a buffer like the master's, by global name."""
        return {
            name: parts_of_flat(
                self._infos[name].full_shape,
                self._infos[name].shape,
                self._infos[name].offsets,
                first,
                last,
                buffer[at : at + last - first],
            )
            for name, first, last, at in self._held()
        }

    def _held(self) -> Iterator[tuple[str, int, int, int]]:
        """(parameter, first, last + 1 element of it, place in the buffer)"""
        base = 0
        for unit in self._units:
            low = self._shard * unit.shard_length
            for name, first, last in unit.held(self._shard):
                yield name, first, last, base + unit.slots[name].start + first - low
            base += unit.shard_length

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted (reading it waits for the device)."""
        return int(next(iter(self.inner.state.values()))["step"].item())

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        for state in self.inner.state.values():
            state["step"].fill_(count)
