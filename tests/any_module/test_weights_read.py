"""What a user reads of the weights outside of the model's call: the right numbers, or a sentence, never old ones."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.errors import GptparError
from tests.any_module.case import WIDTH, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.layouts import covering, each_of
from tests.any_module.matrix import Bench

ALONE = [Setup(1, 0), Setup(1, 3, 1.0), Setup(2, 0, 0.6), Setup(2, 1), Setup(2, 2)]
"""Each process can see to it alone that the values are there."""
TOGETHER = [Setup(2, 1, 0.6), Setup(2, 2, 1.0)]
"""All processes gather them when all read."""
RELEASED = [Setup(2, 3), Setup(2, 3, 0.6)]
"""They are there while a layer needs them."""
READERS: dict[str, Callable[[Any], list[Any]]] = {
    "norms": lambda model: [float(parameter.detach().norm()) for parameter in model.parameters()],
    "by numpy": lambda model: [model.last.weight.detach().numpy().sum(), model.blocks[2].up.weight.tolist()[0][0]],
    "leaf of the root": lambda model: model.last(torch.ones(1, WIDTH, dtype=torch.float64)).tolist(),
    "block by itself": lambda model: block_by_itself(model),
    "copies": lambda model: [copy.deepcopy(model.blocks[1].up.weight).sum().item()],
}


@torch.no_grad()
def block_by_itself(model: Any) -> list[Any]:
    return model.blocks[1](torch.ones(1, WIDTH, dtype=torch.float64)).tolist()


def read(rank: int, setup: Setup, reader: str) -> list[list[Any] | str]:
    """After each of three steps: (what is read, what is there)."""
    training, found = Training(CASES["mlp"], setup), []
    for step in range(3):
        training.engine.backward(training.loss_of(step))
        training.engine.step()
        try:
            got: Any = READERS[reader](training.model)
        except GptparError as error:
            got = str(error)
        with training.engine.gathered():
            found.append([got, READERS[reader](training.model)])
    training.engine.close()
    return found


@pytest.mark.parametrize(
    ("reader", "setup"),
    [*covering(READERS, [*ALONE, *TOGETHER, RELEASED[1]]), ("norms", RELEASED[0]), ("copies", TOGETHER[1])],
)
def test_reading_after_a_step_gives_its_values_or_says_gathered(bench: Bench, setup: Setup, reader: str) -> None:
    for found in bench.on_ranks(setup.world, read, setup, reader):
        assert found[0][1] != found[2][1]
        for got, wanted in found:
            if setup not in RELEASED or reader == "block by itself":
                assert got == wanted
            else:
                assert isinstance(got, str) and re.search(r"(blocks|first|last).*gathered", got), got


def written(rank: int, setup: Setup) -> bool:
    """A weight is doubled after a step, outside of ``gathered``; whether it is in what the next one starts from."""
    training = Training(CASES["mlp"], setup)
    training.run(0, 2)
    with torch.no_grad():
        training.model.last.bias.mul_(2).add_(1)
    wanted = training.trace.weights[-1]["last.bias"] * 2 + 1
    same = torch.equal(training.weights()["last.bias"], wanted)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    training.run(2, 3)
    same = same and torch.equal(training.trace.weights[-1]["last.bias"], wanted)
    training.engine.close()
    return same


@each_of([*ALONE, *TOGETHER])
def test_writing_after_a_step_changes_its_values(bench: Bench, setup: Setup) -> None:
    assert all(bench.on_ranks(setup.world, written, setup))


def about(rank: int, setup: Setup) -> bool:
    """What tells about parameters is always there; and whatever was read, forward sees plain parameters."""
    training, seen = Training(CASES["mlp"], setup), []
    training.model.last.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    for step in range(2):
        for parameter in training.model.parameters():
            assert parameter.numel() == parameter.shape.numel() and parameter.requires_grad and parameter.grad is None
            assert parameter.dtype == torch.float64 and parameter.device.type == "cpu" and parameter.is_leaf
            assert isinstance(parameter, nn.Parameter) and parameter in {parameter: 1} and len(parameter)
            assert parameter.to("cpu") is parameter and parameter.double() is parameter
        training.model.to(training.engine.device).double()
        training.run(step, step + 1)
    training.engine.close()
    return seen == [nn.Parameter] * 2


@each_of([Setup(1, 0), *TOGETHER, *RELEASED])
def test_what_tells_about_parameters_is_always_there(bench: Bench, setup: Setup) -> None:
    assert all(bench.on_ranks(setup.world, about, setup))
