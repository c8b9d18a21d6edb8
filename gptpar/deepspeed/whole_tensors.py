"""``deepspeed.utils.safe_get_...``: a parameter's fp32 value, gradient and optimizer state, wherever they are.

They work at every ZeRO stage and with every ratio of offload. All processes that have the parameter call them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.deepspeed.zero_parameters import owner_of
from gptpar.errors import GptparError


def _of(parameter: torch.Tensor, state: str | None = None) -> tuple[TrainingEngine, str]:
    owner = owner_of(parameter)
    if owner.engine is None:
        raise GptparError(
            f"this parameter of shape {tuple(parameter.shape)} is in no engine: pass one of the module that "
            "deepspeed.initialize has, before engine.destroy()."
        )
    engine = owner.engine.engine
    param = engine.table.params.get(owner.name)
    states = engine.optimizer.states if param is None else engine.optimizer.updates[param.group].states
    if state is not None and state not in states:
        known = ", ".join(states) or "no state"
        raise GptparError(f"the optimizer has no state {state!r}: it has {known}.")
    return owner.engine, owner.name


# Whole tensors.


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """A parameter's master weight; ``None`` if it is not trained."""
    engine, name = _of(param)
    return engine.weights.whole_here(name, "weights")


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """A trained parameter's mean gradient, between a backward pass and the step; ``None``: untrained."""
    engine, name = _of(param)
    return engine.full_gradient(name) if engine.weights.is_trained(name) else None


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """One of the optimizer's states, such as ``exp_avg``; ``None`` if the parameter is not trained."""
    engine, name = _of(param, optim_state_key)
    return engine.weights.whole_here(name, optim_state_key)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Change a parameter's master weight, and the parameter with it; all processes pass the same value."""
    engine, name = _of(param)
    engine.weights.set(name, "weights", value)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace a parameter's mean gradient, between a backward pass and the step, on all processes."""
    engine, name = _of(param)
    engine.set_full_gradient(name, value)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Change one of the optimizer's states; all processes pass the same value."""
    engine, name = _of(param, optim_state_key)
    engine.weights.set(name, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace the mean gradient of each trained parameter by ``update_func(gradient, parameter)``."""
    for param in param_list:
        if (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# The elements that this process updates: [n], in the order of memory. A process may have none of a parameter; together
# the processes' elements, in the order of their numbers, are the whole.


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This process's elements of a master weight; ``None`` if the parameter is not trained."""
    engine, name = _of(param)
    return engine.weights.local(name, "weights")


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This process's elements of what :func:`safe_get_full_grad` returns."""
    engine, name = _of(param)
    return engine.local_gradient(name)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This process's elements of one of the optimizer's states."""
    engine, name = _of(param, optim_state_key)
    return engine.weights.local(name, optim_state_key)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Change this process's elements of a master weight; all processes call it, each with its own values."""
    engine, name = _of(param)
    engine.weights.set(name, "weights", value, local=True)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this process's elements of a mean gradient; all processes call it, each with its own values."""
    engine, name = _of(param)
    engine.set_local_gradient(name, value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Change this process's elements of a state; all processes call it, each with its own values."""
    engine, name = _of(param, optim_state_key)
    engine.weights.set(name, optim_state_key, value, local=True)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Nested tensors with memory of their own, so that ``torch.save`` writes no more than their elements."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
