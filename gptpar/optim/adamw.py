"""AdamW that owns fp32 master weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptpar.config import OptimizerConfig
from gptpar.optim.flat import FlatLayout, l2_norm


@dataclass(frozen=True)
class StepResult:
    """What became of a step, on the device; reading it waits for the step.

    Attributes:
        grad_norm: L2 norm of the whole gradient before clipping, without the loss scale.
        skipped: 1 where the gradient was not finite and nothing was changed, else 0.
    """

    grad_norm: torch.Tensor
    skipped: torch.Tensor


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over flat buffers: master weights, gradient sum and both moments.

    Live parameters of the master's dtype are the masters themselves; 16-bit ones are a flat copy, refreshed after each
    step. Clipping, the loss scale and the skipping of non-finite gradients happen inside torch's fused kernel, without
    waiting for the device.

    Args:
        layout: where each parameter lies.
        param_dtype: dtype of the live parameters.
        device: where everything lies.
        config: betas, epsilon and clipping.
    """

    def __init__(self, layout: FlatLayout, param_dtype: torch.dtype, device: torch.device, config: OptimizerConfig):
        self.layout = layout
        self.clip_grad = config.clip_grad
        wide = torch.promote_types(param_dtype, torch.float32)
        self.master, self.grad, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(layout.length, dtype=wide, device=device) for _ in range(4)
        )
        same = param_dtype == wide
        self.live = self.master if same else torch.zeros(layout.length, dtype=param_dtype, device=device)
        pieces = [slice(0, layout.decayed), slice(layout.decayed, layout.length)]
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        groups = [
            {"params": [self._piece(p)], "weight_decay": 0.0, "decays": p.start == 0 < layout.decayed} for p in pieces
        ]
        self.inner = torch.optim.AdamW(
            groups, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
        )
        for group, piece in zip(self.inner.param_groups, pieces, strict=True):
            self.inner.state[group["params"][0]] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": self.exp_avg[piece],
                "exp_avg_sq": self.exp_avg_sq[piece],
            }

    def _piece(self, piece: slice) -> torch.Tensor:
        flat = self.master[piece].detach().requires_grad_()
        flat.grad = self.grad[piece]
        return flat

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, loss_scale: float) -> StepResult:
        """Update the masters from the gradient sum, and the live parameters from the masters.

        Args:
            lr: this step's learning rate.
            weight_decay: this step's decoupled decay, for the parameters that have one.
            loss_scale: what the gradient sum is to be divided by.
        """
        norm = l2_norm(self.grad) / loss_scale
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
        self.publish()
        return StepResult(norm, skipped)

    def publish(self) -> None:
        """Make the live parameters equal to the masters."""
        if self.live is not self.master:
            self.live.copy_(self.master)

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for a checkpoint: ``weights``, ``exp_avg`` and ``exp_avg_sq``, each by global parameter name."""
        buffers = {"weights": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {kind: self.layout.views(buffer) for kind, buffer in buffers.items()}

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted (reading it waits for the device)."""
        return int(next(iter(self.inner.state.values()))["step"].item())

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        for state in self.inner.state.values():
            state["step"].fill_(count)
