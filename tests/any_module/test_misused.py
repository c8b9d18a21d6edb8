"""Verbs used in ways that have no meaning, or on one process alone: the engine goes on, or says what is wrong."""

import copy
import io
import linecache
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.any_module.case import Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import GPTPAR, Training, initializer
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.zoo import Mlp

SETUPS = [Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 1, accumulation=2), Setup(2, 3, 0.6, 2)]
layouts = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))


# Losses.


def loss_of(training: Training, step: int) -> torch.Tensor:
    return training.case.losses_of(training.engine, training.make_batch(step, 0))[0]


def step_before(rank: int, setup: Setup) -> tuple[str, bool]:
    """(what is said of a loss from before a step, whether training goes on with the right numbers)"""
    training = Training(CASES["mlp"], setup, GPTPAR)
    old = loss_of(training, 5)
    training.run(0, 1)
    told = said(rank, lambda: training.engine.backward(old))
    training.engine.zero_grad()
    trace = training.run(1, 3)
    plain = Training(CASES["mlp"], setup, GPTPAR).run(0, 3)
    return told, all(torch.equal(trace.weights[-1][name], plain.weights[-1][name]) for name in plain.weights[-1])


@layouts
def test_a_loss_from_before_a_step_is_refused(bench: Bench, setup: Setup) -> None:
    for told, goes_on in bench.on_ranks(setup.world, step_before, setup):
        assert "engine.step()" in told and goes_on


def same_loss(rank: int, setup: Setup) -> str:
    training = Training(CASES["mlp"], setup, GPTPAR)
    loss = loss_of(training, 0)
    training.engine.backward(loss)
    if setup.accumulation == 1:
        training.engine.step()
    told = said(rank, lambda: training.engine.backward(loss))
    training.engine.close()
    return told


@layouts
def test_the_same_loss_twice_is_refused(bench: Bench, setup: Setup) -> None:
    assert all("twice" in told for told in bench.on_ranks(setup.world, same_loss, setup))


# Gradients dropped at every micro-batch.

Told = tuple[str, str, str]
"""A warning's sentence, file and line."""

DROPPED = (
    "zero_grad() dropped a step after 1 of its 2 micro-batches, as it did with the step before. If it is called at "
    "every micro-batch, no step is ever taken: leave it out, the engine drops gradients after each step."
)


def told_of(warned: Sequence[warnings.WarningMessage]) -> list[Told]:
    """Warnings of ``zero_grad``."""
    told = [one for one in warned if "zero_grad" in str(one.message)]
    return [
        (str(one.message), Path(one.filename).name, linecache.getline(one.filename, one.lineno).strip()) for one in told
    ]


def dropped_at_every_micro_batch(rank: int, setup: Setup, by_optimizer: bool) -> tuple[int, list[Told]]:
    """(steps taken, what is warned of, and where)"""
    training = Training(CASES["mlp"], setup, GPTPAR)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for micro in range(4):
            if micro:
                (training.optimizer if by_optimizer else training.engine).zero_grad()
            training.engine.backward(loss_of(training, micro))
            training.engine.step()
    return training.engine.global_steps, told_of(told)


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("setup", [Setup(1, 0, 1.0, 2), Setup(2, 2, 0.0, 2)], ids=str)
def test_dropping_gradients_at_every_micro_batch_is_told_once(bench: Bench, setup: Setup, by_optimizer: bool) -> None:
    for steps, told in bench.on_ranks(setup.world, dropped_at_every_micro_batch, setup, by_optimizer):
        assert steps == 0
        assert told == [
            (DROPPED, "test_misused.py", "(training.optimizer if by_optimizer else training.engine).zero_grad()")
        ]


# Inside gathered().


def inside_gathered(rank: int, setup: Setup) -> list[str]:
    """What is wrong in a scope with a state of parts, a forward and a backward pass."""
    training = Training(CASES["mlp"], setup, GPTPAR)
    wanted, wrong = training.run(0, 2).weights[-1], []
    model = training.model

    def compare(when: str, state: dict[str, torch.Tensor]) -> None:
        wrong.extend(f"{name} {when}" for name in state if not torch.equal(state[name], wanted[name]))

    with training.engine.gathered():
        for path in ("", "blocks", "blocks.1", "blocks.1.up", "last"):
            part = model.get_submodule(path)
            compare(f"in {path}", part.state_dict(prefix=f"{path}." if path else ""))
        compare("after states", dict(model.named_parameters()))
        loss = loss_of(training, 2)
        compare("after forward", dict(model.named_parameters()))
        training.engine.backward(loss)
        compare("after backward", dict(model.named_parameters()))
    training.engine.zero_grad()
    training.engine.close()
    return wrong


@layouts
def test_parameters_stay_until_the_end_of_gathered(bench: Bench, setup: Setup) -> None:
    assert bench.on_ranks(setup.world, inside_gathered, setup) == [[]] * setup.world


# Copies.


def copied(rank: int, setup: Setup) -> list[str]:
    """What is said of copies of the engine and of its module; what the module's copy has after closing."""
    training = Training(CASES["mlp"], setup, GPTPAR)
    training.run(0, 1)
    with training.engine.gathered():
        acts = [
            lambda: copy.deepcopy(training.engine),
            lambda: copy.copy(training.engine),
            lambda: torch.save(training.engine, io.BytesIO()),
            lambda: copy.deepcopy(training.model),
        ]
        told = [said(rank, act) for act in acts]
    training.engine.close()
    twin = dict(copy.deepcopy(training.model).named_parameters())
    same = all(torch.equal(value, twin[name]) for name, value in training.trace.weights[-1].items())
    return [*told, "" if same else "other weights"]


@layouts
def test_copies_are_refused_until_the_engine_is_closed(bench: Bench, setup: Setup) -> None:
    for told in bench.on_ranks(setup.world, copied, setup):
        assert all("save_checkpoint" in one for one in told[:-1]) and not told[-1], told


# Models without values.


def on_meta(rank: int) -> str:
    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return Mlp()

    return said(rank, lambda: Training(Case("empty", build), Setup(), GPTPAR))


def test_a_model_without_values_is_refused(bench: Bench) -> None:
    assert re.search(r"(?=.*first\.weight)(?=.*deferred_init)", bench.on_ranks(1, on_meta)[0])


# Errors of one process in initialize.


def other_config(rank: int, folder: str) -> str:
    config: Any = f"{folder}/nowhere.json" if rank == 1 else Setup(2).config(CASES["mlp"])
    return said(rank, lambda: initializer(GPTPAR)(model=Mlp(), config=config))


def other_scheduler(rank: int, folder: str) -> str:
    def make(optimizer: Any) -> Any:
        if rank == 1:
            raise ValueError("no file of rates")
        return LambdaLR(optimizer, lambda step: 1.0)

    config = Setup(2, 3, 0.6).config(CASES["mlp"])
    return said(rank, lambda: initializer(GPTPAR)(model=Mlp().double(), lr_scheduler=make, config=config))


@pytest.mark.parametrize("act", [other_config, other_scheduler], ids=lambda act: act.__name__)
def test_an_error_of_one_process_is_raised_on_all_with_its_rank(bench: Bench, act: Any, tmp_path: Path) -> None:
    first, second = bench.on_ranks(2, act, str(tmp_path))
    assert first == second and "rank 1" in first, (first, second)
