"""Several backward passes in a step's last micro-batch: each adds to a gradient that was final, as in plain torch."""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.offload.bucket_state import BucketState
from tests.any_module.case import FREE, Setup, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.matrix import Bench
from tests.any_module.reference import Named, copy_of_weights

CASE = CASES["mlp"]
STEPS, PASSES = 4, 3
PLACES = ((0, 0.0), (0, 1.0), (2, 0.6), (3, 1.0))
SETUPS = [Setup(world, stage, ratio, clip=FREE) for world in (1, 2) for stage, ratio in PLACES]


def loss_of(model: Any, step: int, number: int) -> torch.Tensor:
    """Each rank has the same batches, so that one process in plain torch stands for all."""
    return CASE.losses_of(model, CASE.make_batch(PASSES * step + number, 0, 0, 1))[0]


def in_plain_torch() -> tuple[list[float], Named]:
    """(norms, last weights) where the first pass's gradient of one parameter is trebled"""
    model, norms = CASE.make_model(), []
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(PASSES):
            loss_of(model, step, number).backward()
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
    training = Training(CASE, setup)
    engine, (name, *_) = training.engine, training.trainable
    norms, speculated = [], 0
    for step in range(STEPS):
        with engine.no_sync() if early else nullcontext():
            engine.backward(loss_of(engine, step, 0))
        speculated += not early and until_speculated(engine, step)
        if (grad := changed_of(training.model).grad) is not None and not early:
            grad.mul_(3)
        else:
            engine.set_full_gradient(name, 3 * engine.full_gradient(name))
        loss_of(engine, step, 1).backward()
        engine.backward(loss_of(engine, step, 2))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    with engine.gathered():
        return norms, speculated, copy_of_weights(training.model)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))
@pytest.mark.parametrize("early", [False, True], ids=["final", "in no_sync"])
def test_a_final_gradient_is_added_to(bench: Bench, setup: Setup, early: bool) -> None:
    """So is one that was read and replaced before it was final."""
    wanted_norms, wanted = in_plain_torch()
    for norms, speculated, weights in bench.on_ranks(setup.world, by_engine, setup, early):
        assert speculated == (STEPS // 2 if setup.ratio and not early else 0)
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
