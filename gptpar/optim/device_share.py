"""The elements of any parameters that the device itself updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gptpar.optim.adamw import divisor_of
from gptpar.optim.buckets import Rates


class DeviceShare:
    """AdamW by torch's fused kernel; clipping, the loss scale and skipping happen inside, without waiting for it.

    Args:
        live: unit -> [n] the parameters' memory, all in one number format or its 16-bit relatives. 16-bit ones get
            fp32 masters; the others are their own.
        groups: unit -> number of its group.

    Attributes:
        masters: unit -> [n] master weights.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], groups: Mapping[str, int]):
        self.masters = {
            unit: values.to(torch.promote_types(values.dtype, torch.float32)) for unit, values in live.items()
        }
        self._leaves = {unit: master.detach().requires_grad_() for unit, master in self.masters.items()}
        self._rounded = [(values, self.masters[unit]) for unit, values in live.items() if values.dtype.itemsize == 2]
        self._inner: torch.optim.AdamW | None = None
        if live:
            members = {n: [leaf for unit, leaf in self._leaves.items() if groups[unit] == n] for n in groups.values()}
            self._inner = torch.optim.AdamW([{"params": m, "group": n} for n, m in members.items() if m], fused=True)
            for leaf in self._leaves.values():
                step = torch.zeros((), dtype=torch.float32, device=leaf.device)
                moments = {name: torch.zeros_like(leaf, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                self._inner.state[leaf] = {"step": step, **moments}

    def step(
        self,
        norm: torch.Tensor,
        rates: Sequence[Rates],
        loss_scale: float,
        max_norm: float,
        grads: Mapping[str, torch.Tensor],
    ) -> None:
        """Update masters and parameters, unless the norm is not finite.

        Args:
            norm: the whole gradient's, without the loss scale (fp64 scalar on the device).
            rates: by group.
            max_norm: see :func:`~gptpar.optim.adamw.divisor_of`.
            grads: unit -> [n]; units without one stay as they are. fp32 ones are divided in place.
        """
        if self._inner is None:
            return
        finite, divisor = norm.isfinite(), divisor_of(norm, loss_scale, max_norm)
        for group in self._inner.param_groups:
            its = rates[group["group"]]
            group.update(lr=its.lr, betas=(its.beta1, its.beta2), eps=its.eps, weight_decay=its.weight_decay)
        for unit, leaf in self._leaves.items():
            grad = grads.get(unit)
            if grad is not None and leaf.dtype == torch.float64:  # the fused kernel divides by an fp32 number
                leaf.grad = grad / divisor.where(finite, 1.0)
            else:
                leaf.grad = None if grad is None else grad.to(leaf.dtype)
        wide = any(leaf.dtype == torch.float64 for leaf in self._leaves.values())
        self._inner.grad_scale = torch.ones_like(divisor).float() if wide else divisor.float()  # type: ignore[attr-defined]
        self._inner.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self._inner.step()
        self.publish()
        self._inner.zero_grad()

    def publish(self) -> None:
        """Round masters to parameters."""
        if self._rounded:
            torch._foreach_copy_([values for values, _ in self._rounded], [master for _, master in self._rounded])

    def values(self, unit: str, kind: str) -> torch.Tensor:
        """[n] live ``weights``, ``exp_avg`` or ``exp_avg_sq``; of a unit that is not here, none."""
        if unit not in self.masters or self._inner is None:
            return torch.empty(0)
        return self.masters[unit] if kind == "weights" else self._inner.state[self._leaves[unit]][kind]

    def steps_of(self, unit: str) -> int:
        """A unit's updates so far; waits for the device."""
        assert self._inner is not None
        return int(self._inner.state[self._leaves[unit]]["step"].item())

    def set_steps(self, unit: str, count: int) -> None:
        """Go on as if there had been so many."""
        if self._inner is not None and unit in self._leaves:
            self._inner.state[self._leaves[unit]]["step"].fill_(count)
