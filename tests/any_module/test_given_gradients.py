"""Gradients that are added to when they were final, and parts of gradients, weights and moments that the user sets."""

import time
from contextlib import nullcontext
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
from gptpar.offload.bucket_state import BucketState
from tests.any_module.case import FREE, Setup, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.harness import Alike
from tests.any_module.layouts import each_of
from tests.any_module.matrix import Bench
from tests.any_module.reference import Named, a_loop, assert_weights, copy_of_weights

# Several backward passes in a step's last micro-batch: each adds to a gradient that was final, as in plain torch.


CASE = CASES["mlp"]
STEPS, PASSES = 4, 3
PLACES = ((0, 0.0), (0, 1.0), (2, 0.6), (3, 1.0))
SETUPS = [Setup(world, stage, ratio, clip=FREE) for world in (1, 2) for stage, ratio in PLACES]


def in_plain_torch() -> tuple[list[float], Named]:
    """(norms, last weights) where the first pass's gradient of one parameter is trebled"""
    model, norms = CASE.make_model(), []
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(PASSES):
            CASE.losses_of(model, CASE.make_batch(PASSES * step + number, 0, 0, 1))[0].backward()
            if not number:
                changed_of(model).grad.mul_(3)  # type: ignore[union-attr]
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
    return norms, copy_of_weights(model)


def changed_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def until_speculated(engine: Any, step: int) -> bool:
    """Wait until the CPU has worked ahead, in every other step; returns whether it has."""
    if engine.host is None or step % 2:
        return False
    buckets = engine.host.shared.buckets
    while not any(bucket.state is BucketState.SPECULATED for bucket in buckets):
        time.sleep(0.01)
    return True


def by_engine(rank: int, setup: Setup, early: bool) -> tuple[list[float], int, Named]:
    """(norms, steps that had been speculated, last weights); ``early``: the first pass is not final."""
    training = Alike(CASE, setup)
    engine, (name, *_) = training.engine, training.trainable
    norms, speculated = [], 0
    for step in range(STEPS):
        with engine.no_sync() if early else nullcontext():
            engine.backward(training.loss_of(PASSES * step))
        speculated += not early and until_speculated(engine, step)
        if (grad := changed_of(training.model).grad) is not None and not early:
            grad.mul_(3)
        else:
            engine.set_full_gradient(name, 3 * engine.full_gradient(name))
        training.loss_of(PASSES * step + 1).backward()
        engine.backward(training.loss_of(PASSES * step + 2))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, speculated, training.weights()


@each_of(SETUPS)
@pytest.mark.parametrize("early", [False, True], ids=["final", "in no_sync"])
def test_a_final_gradient_is_added_to(bench: Bench, setup: Setup, early: bool) -> None:
    """So is one that was read and replaced before it was final."""
    wanted_norms, wanted = in_plain_torch()
    found = bench.on_ranks(setup.world, by_engine, setup, early)
    for norms, speculated, _ in found:
        assert speculated == (STEPS // 2 if setup.ratio and not early else 0)
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
    assert_weights((weights for *_, weights in found), wanted)


# ``safe_get_local_...`` and ``safe_set_local_...`` act on each process's elements, which together are the whole.


NUM_STEPS = 3
LOCAL_PLACES = ((0, 1.0), (1, 0.0), (2, 0.6), (3, 0.6))
LOCAL_SETUPS = [Setup(1, 0, 1.0, clip=0.05), *(Setup(2, stage, ratio, clip=0.05) for stage, ratio in LOCAL_PLACES)]


def clamped(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-1e-3, 1e-3)


def together(local: torch.Tensor) -> torch.Tensor:
    """All processes' elements in a row."""
    if not dist.is_initialized():
        return local
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local)
    return torch.cat(every)


def by_local_elements(rank: int, setup: Setup) -> tuple[list[float], dict[str, torch.Tensor]]:
    training, norms = Alike(CASES["mlp"], setup), []
    engine: Any = training.engine
    mark_trained(engine)
    parameters = list(training.model.parameters())
    for step in range(NUM_STEPS):
        engine.backward(training.loss_of(step))
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
    return norms, training.weights()


def change_gradients(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        assert p.grad is not None
        p.grad = 3 * p.grad if number % 2 else clamped(p.grad)


def change_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data.mul_(0.75)
        optimizer.state[p]["exp_avg"].mul_(0.5)


@each_of(LOCAL_SETUPS)
def test_local_elements_are_the_whole_and_count(bench: Bench, setup: Setup) -> None:
    changes = {"before_clip": change_gradients, "after_step": change_states}
    wanted_norms, wanted = a_loop(CASES["mlp"], NUM_STEPS, clip=setup.clip, **changes)
    found = bench.on_ranks(setup.world, by_local_elements, setup)
    assert all(norms == pytest.approx(wanted_norms, rel=1e-10) for norms, _ in found)
    assert_weights((weights for _, weights in found), wanted)
