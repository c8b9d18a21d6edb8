"""Adam with moments in fp32 beside 16-bit parameters, for programs that step it themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

_OF_GROUP = ("amsgrad", "decoupled_weight_decay", "lr", "weight_decay", "eps", "maximize")


class WideAdam(torch.optim.AdamW):
    """torch's AdamW, or its Adam; 16-bit parameters have moments in fp32, and are updated in fp32.

    Args:
        params: as of torch's.
        decoupled: whether the decay is AdamW's.
        hyperparameters: further ones of torch's AdamW.
    """

    def __init__(self, params: Any, *, decoupled: bool = True, **hyperparameters: Any):
        super().__init__(params, **hyperparameters)
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient; returns what the closure returns."""
        if all(one.itemsize >= 4 for group in self.param_groups for one in group["params"]):
            return super().step(closure)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self._update(group, one)
        return loss

    def _update(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        largest = ["max_exp_avg_sq"] if group["amsgrad"] else []
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", *largest):
                state[name] = torch.zeros_like(parameter, dtype=wide)
        assert parameter.grad is not None
        values, (beta1, beta2) = parameter.detach().to(wide, copy=True), group["betas"]
        adam(
            [values],
            [parameter.grad.to(wide)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state[name] for name in largest],
            [state["step"]],
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in _OF_GROUP},
        )
        parameter.copy_(values)
