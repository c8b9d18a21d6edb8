"""Parameters that are given other memory after ``initialize`` are noticed before a step trains what nobody uses."""

import copy
import re
from collections.abc import Callable

import pytest
import torch

from gptpar.errors import GptparError
from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import GPTPAR, Training
from tests.any_module.layouts import covering
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said

SETUPS = [Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 2), Setup(2, 3, 0.6)]

Change = Callable[[Training], object]


def cast(training: Training) -> object:
    return training.model.float()


def cast_engine(training: Training) -> object:
    return training.engine.half()


def cast_a_block(training: Training) -> object:
    return training.model.blocks[1].to(torch.float32)


def assigned(training: Training) -> object:
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    return training.model.load_state_dict(state, assign=True)


def by_data(training: Training) -> None:
    training.model.blocks[1].up.weight.data = torch.zeros_like(training.model.blocks[1].up.weight)


def another_parameter(training: Training) -> None:
    like = training.model.blocks[1].up.weight
    training.model.blocks[1].up.weight = torch.nn.Parameter(torch.zeros_like(like))


def new_head(training: Training) -> None:
    training.model.last = torch.nn.Linear(16, 16).double()


def new_block(training: Training) -> None:
    training.model.blocks.append(copy.deepcopy(CASES["mlp"].make_model().blocks[0]))


def new_parameter(training: Training) -> None:
    training.model.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


def added(rank: int, setup: Setup, change: Change) -> str:
    training = Training(CASES["mlp"], setup, GPTPAR)
    training.run(0, 1)
    training.model.metric = torch.nn.Linear(2, 2).requires_grad_(False)  # is nobody's concern
    training.run(1, 2)
    change(training)
    return said(rank, training.run, 2, 3)


LATER = {new_head: "last.weight", new_block: "blocks.3.norm.weight", new_parameter: "scale"}


@pytest.mark.parametrize(("change", "setup"), covering(LATER, SETUPS))
def test_parameters_that_come_later_are_refused(bench: Bench, setup: Setup, change: Change) -> None:
    name = LATER[change]
    for told in bench.on_ranks(setup.world, added, setup, change):
        assert re.search(rf"^{name}.* came into the model after gptpar.initialize.*engine.close\(\)", told), told


def changed(rank: int, setup: Setup, change: Change, gathers: bool) -> str:
    training = Training(CASES["mlp"], setup, GPTPAR)
    training.run(0, 1)
    batch = training.make_batch(1, 0)
    try:
        if gathers:
            with training.engine.gathered():
                change(training)
        else:
            change(training)
        if change in (cast, cast_engine, cast_a_block):  # whoever casts the model has its inputs cast
            loss = sum(parameter.sum() for parameter in training.model.parameters())
        else:
            loss = training.case.losses_of(training.engine, batch)[0]
        training.engine.backward(loss)
        training.engine.step()
    except GptparError as error:
        return str(error)
    finally:
        training.engine.close()
    return ""


@pytest.mark.parametrize(
    ("change", "setup"), covering([cast, cast_engine, cast_a_block, assigned, by_data, another_parameter], SETUPS)
)
def test_other_memory_is_refused(bench: Bench, setup: Setup, change: Change) -> None:
    gathers = (setup in SETUPS[1::2]) == (change in (cast, assigned, by_data))
    for told in bench.on_ranks(setup.world, changed, setup, change, gathers):
        assert re.search(r"(?=.*(blocks\.1\.|first\.weight))(?=.*(close|gathered))", told), told
