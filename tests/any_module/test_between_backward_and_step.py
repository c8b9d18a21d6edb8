"""Parameters have the last step's values until the next step, also where the CPU works ahead of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.any_module.case import Setup, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.layouts import covering
from tests.any_module.matrix import Bench
from tests.any_module.reference import Named, copy_of_weights

CASE = CASES["mlp"]
STEPS = 4
FREE = 1e3  # a gradient's norm never reaches it, so that each speculation is right


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Each rank has the same batches, so that one process in plain PyTorch stands for all."""
    return CASE.losses_of(model, CASE.make_batch(step, 0, 0, 1))[0]


def in_plain_torch() -> Named:
    model = CASE.make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return copy_of_weights(model)


def read_in_gathered(training: Training) -> Any:
    with training.engine.gathered():
        return copy_of_weights(training.model)


def read_plainly(training: Training) -> Any:
    return copy_of_weights(training.model)


def forward(training: Training) -> Any:
    with torch.no_grad():
        return {"loss": loss_of(training.engine, 99).detach().clone()}


def forward_of_the_module(training: Training) -> Any:
    with torch.no_grad():
        return {"loss": loss_of(training.model, 99).detach().clone()}


ALONE = [Setup(1, stage, ratio, clip=FREE) for stage, ratio in ((0, 0.0), (0, 1.0), (2, 0.6), (3, 1.0))]
TOGETHER = [Setup(2, stage, ratio, clip=FREE) for stage, ratio in ((0, 1.0), (2, 0.6), (3, 1.0))]


def observed(rank: int, setup: Setup, observe: Any) -> tuple[list[Any], int, Named]:
    """(what was seen before and after each backward pass, elements updated ahead of a step, the last weights)"""
    training, pairs = Training(CASE, setup), []
    for step in range(STEPS):
        before = observe(training)
        training.engine.backward(loss_of(training.engine, step))
        host = training.engine.host
        if step % 2 == 0:  # in other steps the CPU is still at work
            time.sleep(0.05)
        pairs.append((before, observe(training)))
        assert host is None or host.num_ahead == 0
        training.engine.step()
    # A step that nobody looks into is speculated.
    training.engine.backward(loss_of(training.engine, STEPS))
    time.sleep(0.2)
    training.engine.step()
    with training.engine.gathered():
        host = training.engine.host
        return pairs, 0 if host is None else host.num_ahead, copy_of_weights(training.model)


@pytest.mark.parametrize(
    ("observe", "setup"),
    [
        *covering([read_plainly], ALONE),
        *covering([read_in_gathered, forward, forward_of_the_module], [*ALONE, *TOGETHER]),
    ],
)
def test_the_last_steps_values_are_seen(bench: Bench, setup: Setup, observe: Any) -> None:
    expected = in_plain_torch()
    for pairs, ahead, weights in bench.on_ranks(setup.world, observed, setup, observe):
        for before, between in pairs:
            assert all(torch.equal(before[name], between[name]) for name in before)
        assert (ahead > 0) == (setup.ratio > 0)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
