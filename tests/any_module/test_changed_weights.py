"""Weights that the user changes or gives other memory: it counts as in plain torch, or a sentence says why not."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptpar.errors import GptparError
from tests.any_module.case import WIDTH, Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Alike, Training, initializer
from tests.any_module.layouts import covering, each_of, named
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.reference import Named, assert_weights, copy_of_weights, weights_of_a_loop
from tests.any_module.zoo import Mlp

ALONE = [Setup(1, 0), Setup(1, 3, 1.0), Setup(1, 0, 0.6), Setup(2, 0), Setup(2, 0, 0.6), Setup(2, 2)]
RELEASED = [Setup(2, 3), Setup(2, 3, 0.6)]
"""Layouts in which parameters are released after the forward."""
STEPS, BOUND = 4, 0.1


class Clamps(Mlp):
    """Keeps its weights small, before it uses them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-BOUND, BOUND)
        return super().forward(x)


class ClampsInBlocks(nn.Module):
    """Each block does it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamps(blocks=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class FollowsSlowly(nn.Module):
    """A frozen copy follows the trained half within the forward, as MoCo's key encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.follower = Mlp(), Mlp().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, its in zip(self.follower.parameters(), self.trained.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
            aim = self.follower(x)
        return self.trained(x) + aim


class NormalisesData(Mlp):
    """Writes through .data, which leaves no trace on the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.weight.data.copy_(F.normalize(self.last.weight.data, dim=1))
        return super().forward(x)


def in_plain_torch(case: Case, accumulation: int = 1, after_step: Any = lambda model, optimizer: None) -> Named:
    return weights_of_a_loop(case, STEPS, accumulation, clip=0.5, after_step=after_step)


def by_engine(rank: int, case: Case, setup: Setup, between: Callable[[Training], None] | None = None) -> Named | str:
    """The same, or the sentence."""
    training = Alike(case, setup)
    try:
        for step in range(STEPS):
            for micro in range(setup.accumulation):
                training.engine.backward(training.loss_of(step, micro))
                training.engine.step()
            if between is not None:
                between(training)
        return training.weights()
    except GptparError as error:
        return str(error)
    finally:
        training.engine.close()


def assert_same(found: list[Any], wanted: Named) -> None:
    assert not any(isinstance(one, str) for one in found), found
    assert_weights(found, wanted)


FORWARDS = {kind.__name__: kind for kind in (Clamps, ClampsInBlocks, FollowsSlowly, NormalisesData)}


@pytest.mark.parametrize(
    ("name", "setup"), [(name, ALONE[at]) for at, name in enumerate([*FORWARDS][:3] * 2)], ids=named
)
def test_changes_in_the_forward_count(bench: Bench, name: str, setup: Setup) -> None:
    case, accumulation = Case(name, FORWARDS[name]), 1 + (ALONE.index(setup) + len(name)) % 2
    found = bench.on_ranks(setup.world, by_engine, case, replace(setup, accumulation=accumulation))
    assert_same(found, in_plain_torch(case, accumulation))


@pytest.mark.parametrize(("name", "setup"), [(name, RELEASED[at % 2]) for at, name in enumerate(FORWARDS)], ids=named)
def test_where_parameters_are_released_changes_in_the_forward_are_refused(
    bench: Bench, name: str, setup: Setup
) -> None:
    for told in bench.on_ranks(setup.world, by_engine, Case(name, FORWARDS[name]), setup):
        assert isinstance(told, str) and re.search(r"(weight|bias).*in the model's forward.*gathered", told), told


@each_of([ALONE[1], ALONE[4]])
def test_hidden_changes_in_the_forward_are_refused(bench: Bench, setup: Setup) -> None:
    for told in bench.on_ranks(setup.world, by_engine, Case("normalises", NormalisesData), setup):
        assert isinstance(told, str) and told.startswith("last.weight changed in place through .data"), told


def clamp_data(module: nn.Module) -> None:
    """As Wasserstein GANs do."""
    for parameter in module.parameters():
        parameter.data.clamp_(-BOUND, BOUND)


def clamp_between(training: Training) -> None:
    clamp_data(training.model)


def clamp_gathered(training: Training) -> None:
    with training.engine.gathered():
        clamp_data(training.model)


@pytest.mark.parametrize(
    ("between", "setup"),
    [
        *((clamp_between, one) for one in (ALONE[1], ALONE[2], ALONE[5], RELEASED[1])),
        *((clamp_gathered, one) for one in (ALONE[0], ALONE[4], RELEASED[1])),
    ],
    ids=named,
)
def test_changes_through_data_between_steps_count(
    bench: Bench, setup: Setup, between: Callable[[Training], None]
) -> None:
    found = bench.on_ranks(setup.world, by_engine, CASES["mlp"], setup, between)
    if setup in RELEASED and between is clamp_between:
        assert all(isinstance(told, str) and "gathered" in told for told in found), found
    else:
        assert_same(found, in_plain_torch(CASES["mlp"], after_step=lambda model, _: clamp_data(model)))


def clamped_in_bf16(rank: int, setup: Setup, engine: str) -> bool:
    """Whether weights clamped through ``.data`` stay so in a step of rate zero, which starts from fp32 masters."""
    model = CASES["mlp"].make_model().float()
    config = {**setup.config(CASES["mlp"]), "bf16": {"enabled": True, "auto_cast": True}}
    made, optimizer, _, _ = initializer(engine)(model=model, model_parameters=model.parameters(), config=config)
    optimizer.param_groups[0]["lr"] = 0.0
    with made.gathered():
        clamp_data(model)
    made.backward(made(torch.ones(2, WIDTH)).square().mean().float())
    made.step()
    with made.gathered():
        return max(parameter.abs().max().item() for parameter in model.parameters()) < BOUND + 1e-3


@each_of([Setup(1, 0), Setup(2, 0), Setup(2, 3, 0.6)])
def test_changes_through_data_reach_the_masters_of_bf16(bench: Bench, setup: Setup) -> None:
    assert all(bench.on_ranks(setup.world, clamped_in_bf16, setup, bench.engine))


def clamped_before_the_step(rank: int, setup: Setup) -> tuple[str, bool]:
    """(what is said of a change between backward and step, whether nothing was updated)"""
    training = Training(CASES["mlp"], setup)
    training.engine.backward(training.loss_of(0))
    with torch.no_grad():
        training.model.first.weight.fill_(0.5)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    told = said(rank, training.engine.step)
    return told, all(map(torch.equal, before, training.model.parameters()))


@each_of([Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 0)])
def test_a_change_between_backward_and_step_is_refused(bench: Bench, setup: Setup) -> None:
    for told, kept in bench.on_ranks(setup.world, clamped_before_the_step, setup):
        assert re.search(r"^first\.weight changed in place since engine.backward.*engine.step\(\)", told) and kept


def stale() -> nn.Module:
    """A backward pass before ``initialize`` leaves gradients behind."""
    model = Mlp()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    return model


@each_of([Setup(1, 0), Setup(2, 3, 0.6)])
def test_gradients_from_before_initialize_do_not_count(bench: Bench, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, by_engine, Case("stale", stale), setup)
    assert_same(found, in_plain_torch(CASES["mlp"]))


# Parameters that are given other memory are noticed before a step trains what nobody uses.

EACH_MEMORY = [Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 2), Setup(2, 3, 0.6)]


def assign_data(training: Training) -> None:
    weight = training.model.blocks[1].up.weight
    weight.data = torch.zeros_like(weight)


CHANGES: dict[str, Callable[[Training], object]] = {
    "model cast": lambda training: training.model.float(),
    "engine cast": lambda training: training.engine.half(),
    "block cast": lambda training: training.model.blocks[1].to(torch.float32),
    "state assigned": lambda training: training.model.load_state_dict(copy_of_weights(training.model), assign=True),
    "data assigned": assign_data,
    "another parameter": lambda training: training.model.blocks[1].up.register_parameter("weight", zeros(32, 16)),
}
LATER: dict[str, Callable[[Training], object]] = {
    "last.weight": lambda training: training.model.add_module("last", nn.Linear(16, 16).double()),
    "blocks.3.norm.weight": lambda training: training.model.blocks.append(CASES["mlp"].make_model().blocks[0]),
    "scale": lambda training: training.model.register_parameter("scale", zeros(1)),
}


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float64))


def added_later(rank: int, setup: Setup, name: str) -> str:
    training = Training(CASES["mlp"], setup)
    training.run(0, 1)
    training.model.metric = torch.nn.Linear(2, 2).requires_grad_(False)  # is nobody's concern
    training.run(1, 2)
    LATER[name](training)
    return said(rank, training.run, 2, 3)


@pytest.mark.parametrize(("name", "setup"), covering(LATER, EACH_MEMORY))
def test_parameters_that_come_later_are_refused(bench: Bench, setup: Setup, name: str) -> None:
    for told in bench.on_ranks(setup.world, added_later, setup, name):
        assert re.search(rf"^{name}.* came into the model after gptpar.initialize.*engine.close\(\)", told), told


def given_other_memory(rank: int, setup: Setup, change: str, gathers: bool) -> str:
    training = Training(CASES["mlp"], setup)
    training.run(0, 1)

    def change_and_train() -> None:
        with training.engine.gathered() if gathers else nullcontext():
            CHANGES[change](training)
        if "cast" in change:  # whoever casts the model has its inputs cast
            loss = sum(parameter.sum() for parameter in training.model.parameters())
        else:
            loss = training.loss_of(1)
        training.engine.backward(loss)
        training.engine.step()

    told = said(rank, change_and_train)
    training.engine.close()
    return told


@pytest.mark.parametrize(("change", "setup"), covering(CHANGES, EACH_MEMORY))
def test_other_memory_is_refused(bench: Bench, setup: Setup, change: str) -> None:
    gathers = (setup in EACH_MEMORY[1::2]) == (change in ("model cast", "state assigned", "data assigned"))
    for told in bench.on_ranks(setup.world, given_other_memory, setup, change, gathers):
        assert re.search(r"(?=.*(blocks\.1\.|first\.weight))(?=.*(close|gathered))", told), told
