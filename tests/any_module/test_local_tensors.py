"""``safe_get_local_...`` and ``safe_set_local_...`` act on each process's elements, which together are the whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gptpar.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from torch import nn

from gptpar.deepspeed.zero_parameters import mark_trained
from gptpar.errors import GptparError
from tests.any_module.case import Setup, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.matrix import Bench
from tests.any_module.reference import copy_of_weights

STEPS = 3
PLACES = ((0, 1.0), (1, 0.0), (2, 0.6), (3, 0.6))
SETUPS = [Setup(1, 0, 1.0, clip=0.05), *(Setup(2, stage, ratio, clip=0.05) for stage, ratio in PLACES)]


def clamped(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-1e-3, 1e-3)


def together(local: torch.Tensor) -> torch.Tensor:
    """All processes' elements in a row."""
    if not dist.is_initialized():
        return local
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local)
    return torch.cat(every)


def by_engine(rank: int, setup: Setup) -> tuple[list[float], dict[str, torch.Tensor]]:
    training, norms = Training(CASES["mlp"], setup), []
    engine: Any = training.engine
    mark_trained(engine)
    parameters = list(training.model.parameters())
    for step in range(STEPS):
        engine.backward(training.case.losses_of(engine, training.make_batch(step, 0))[0])
        for p in parameters[::2]:
            local, whole = safe_get_local_grad(p), safe_get_full_grad(p)
            whole_over_processes = together(local)[: whole.numel() if setup.stage else local.numel()]
            assert torch.equal(whole_over_processes.view_as(whole), whole)
            safe_set_local_grad(p, clamped(local))
        safe_update_full_grad_vectorized(parameters[1::2], lambda grad, p: 3 * grad)
        engine.step()
        for p in parameters:
            safe_set_local_fp32_param(p, safe_get_local_fp32_param(p) * 0.75)
            safe_set_local_optimizer_state(p, safe_get_local_optimizer_state(p, "exp_avg") * 0.5, "exp_avg")
            assert safe_get_full_fp32_param(p).shape == safe_get_full_optimizer_state(p, "exp_avg").shape == p.shape
        norms.append(engine.get_global_grad_norm())
    with pytest.raises(GptparError, match="have the shape .*, and the new value"):
        safe_set_local_fp32_param(p, torch.zeros(p.numel() + 1))
    with pytest.raises(GptparError, match=r"set_full_gradient\(\) works only between"):
        engine.set_full_gradient(training.trainable[0], torch.zeros(1))
    with pytest.raises(GptparError, match="no state 'momentum': it has exp_avg, exp_avg_sq"):
        safe_get_local_optimizer_state(p, "momentum")
    with engine.gathered():
        return norms, copy_of_weights(training.model)


def change_gradients(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        assert p.grad is not None
        p.grad = 3 * p.grad if number % 2 else clamped(p.grad)


def change_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data.mul_(0.75)
        optimizer.state[p]["exp_avg"].mul_(0.5)


def in_plain_torch(rank: int, setup: Setup) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same changes of gradients before a step and of weights and moments after it."""
    case = CASES["mlp"]
    model, norms = case.make_model(), []
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(setup.world):
            (case.losses_of(model, case.make_batch(step, 0, other, setup.world))[0] / setup.world).backward()
        change_gradients(model)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), setup.clip).item())
        optimizer.step()
        change_weights(model, optimizer)
    return norms, copy_of_weights(model)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))
def test_local_elements_are_the_whole_and_count(bench: Bench, setup: Setup) -> None:
    ((wanted_norms, wanted),) = bench.on_ranks(1, in_plain_torch, setup)
    for norms, weights in bench.on_ranks(setup.world, by_engine, setup):
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
        for name, value in wanted.items():
            assert (weights[name] - value).abs().max() <= 1e-10 * value.abs().max(), name
