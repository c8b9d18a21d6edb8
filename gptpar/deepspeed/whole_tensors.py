"""``deepspeed.utils.safe_get_...``: a parameter's fp32 value, gradient and optimizer state, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gptpar.any_module.training_engine import TrainingEngine
from gptpar.deepspeed.zero_parameters import owner_of
from gptpar.errors import GptparError


def _of(parameter: torch.Tensor) -> tuple[TrainingEngine, str]:
    owner = owner_of(parameter)
    if owner.engine is None:
        raise GptparError(
            f"this parameter of shape {tuple(parameter.shape)} is in no engine: pass one of the module that "
            "deepspeed.initialize has, before engine.destroy()."
        )
    return owner.engine, owner.name


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """A parameter's master weight; all processes call it."""
    engine, name = _of(param)
    return engine.weights.whole(name, "weights")


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor:
    """A parameter's mean gradient, between the step's last backward pass and the step; all processes call it."""
    engine, name = _of(param)
    return engine.full_gradient(name)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """One of the optimizer's states, such as ``exp_avg``; all processes call it."""
    engine, name = _of(param)
    return engine.weights.whole(name, optim_state_key)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Change a parameter's master weight, and the parameter with it; all processes call it with the same value."""
    engine, name = _of(param)
    engine.weights.set_whole(name, "weights", value)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace a parameter's mean gradient, between the step's last backward pass and the step, on all processes."""
    engine, name = _of(param)
    engine.set_full_gradient(name, value)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Change one of the optimizer's states; all processes call it with the same value."""
    engine, name = _of(param)
    engine.weights.set_whole(name, optim_state_key, value)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Nested tensors with memory of their own, so that ``torch.save`` writes no more than their elements."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
