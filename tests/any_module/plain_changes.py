"""A loop in plain torch that changes gradients before a step and weights after it, and engines that must follow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.any_module.case import Setup, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.matrix import Bench
from tests.any_module.reference import copy_of_weights

NormsAndWeights = tuple[list[float], dict[str, torch.Tensor]]
"""The norm of each step, and the weights after the last one."""
ByEngine = Callable[[int, Setup], NormsAndWeights]
ChangeGradients = Callable[[nn.Module], None]
ChangeWeights = Callable[[nn.Module, torch.optim.Optimizer], None]


def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights stay as the step left them."""


def in_plain_torch(
    rank: int, setup: Setup, steps: int, change_gradients: ChangeGradients, change_weights: ChangeWeights
) -> NormsAndWeights:
    case = CASES["mlp"]
    model, norms = case.make_model(), []
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for other in range(setup.world):
            (case.losses_of(model, case.make_batch(step, 0, other, setup.world))[0] / setup.world).backward()
        change_gradients(model)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), setup.clip).item())
        optimizer.step()
        change_weights(model, optimizer)
    return norms, copy_of_weights(model)


def assert_follows(
    bench: Bench,
    setup: Setup,
    by_engine: ByEngine,
    steps: int,
    change_gradients: ChangeGradients,
    change_weights: ChangeWeights = unchanged,
) -> None:
    """NormsAndWeights and weights on every process, to 1e-10."""
    ((wanted_norms, wanted),) = bench.on_ranks(1, in_plain_torch, setup, steps, change_gradients, change_weights)
    for norms, weights in bench.on_ranks(setup.world, by_engine, setup):
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
        for name, value in wanted.items():
            assert (weights[name] - value).abs().max() <= 1e-10 * value.abs().max(), name
