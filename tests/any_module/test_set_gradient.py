"""``engine.set_full_gradient`` acts on the step and its norm, wherever the gradient is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gptpar.errors import GptparError
from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.matrix import Bench
from tests.any_module.plain_changes import assert_follows
from tests.any_module.reference import copy_of_weights

STEPS = 4
PLACES = ((0, 0.0), (0, 1.0), (2, 0.6), (3, 0.6))
SETUPS = [Setup(world, stage, ratio, clip=0.05) for world in (1, 2) for stage, ratio in PLACES]


def new(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-1e-3, 1e-3) if name.endswith("weight") else 3 * grad


def by_engine(rank: int, setup: Setup) -> tuple[list[float], dict[str, torch.Tensor]]:
    training, norms = Training(CASES["mlp"], setup), []
    engine: Any = training.engine
    for step in range(STEPS):
        engine.backward(training.case.losses_of(engine, training.make_batch(step, 0))[0])
        for name in training.trainable[::2]:
            wanted = new(name, engine.full_gradient(name))
            engine.set_full_gradient(name, wanted)
            assert torch.allclose(engine.full_gradient(name), wanted, rtol=1e-14)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    with pytest.raises(GptparError, match=r"set_full_gradient\(\) works only between"):
        engine.set_full_gradient(training.trainable[0], torch.zeros(1))
    with engine.gathered():
        return norms, copy_of_weights(training.model)


def change_gradients(model: nn.Module) -> None:
    for name, p in list(model.named_parameters())[::2]:
        assert p.grad is not None
        p.grad = new(name, p.grad)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))
def test_a_new_gradient_counts(bench: Bench, setup: Setup) -> None:
    assert_follows(bench, setup, by_engine, STEPS, change_gradients)
