"""Verbs used in ways that have no meaning, or by some processes alone: the engine goes on, or says what is wrong."""

import copy
import io
import linecache
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import gptpar
from gptpar.adapter.guards import order_watch
from gptpar.errors import GptparError
from tests.any_module.case import Case, Setup, engine_config
from tests.any_module.cases import CASES
from tests.any_module.compare import problems
from tests.any_module.harness import GPTPAR, Training, initializer, worst_of_ranks
from tests.any_module.layouts import each_of, named
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.pipeline_layers import Divided, data_of, layers, loss_of
from tests.any_module.reference import Named, Trace, copy_of_weights
from tests.any_module.zoo import Mlp
from tests.spawn import spawn

SETUPS = [Setup(1, 0), Setup(1, 0, 1.0), Setup(2, 1, accumulation=2), Setup(2, 3, 0.6)]
STEPS = 3


def misused(rank: int, setup: Setup) -> tuple[Trace, dict[str, list[str]], list[str]]:
    """(three steps between which the engine is misused, what is said of that, weights that were wrong)"""
    training, told = Training(CASES["mlp"], setup), {}
    x = training.make_batch(0, 0)["x"]
    told["a verb out of order"] = [
        error_of(lambda: training.engine.backward(torch.zeros(()))),  # it has no graph
        error_of(lambda: training.engine.backward(training.engine(x))),  # it is no scalar
    ]
    if setup.accumulation == 1:
        told["a verb out of order"].append(error_of(training.engine.step))
    training.engine.zero_grad()
    old = training.loss_of(5)
    training.run(0, 1)
    told["a loss from before a step"] = [said(rank, lambda: training.engine.backward(old))]
    training.engine.zero_grad()
    trace = training.run(1, STEPS)
    wrong = wrong_inside_gathered(training)
    with training.engine.gathered():
        copies = [
            lambda: copy.deepcopy(training.engine),
            lambda: copy.copy(training.engine),
            lambda: torch.save(training.engine, io.BytesIO()),
            lambda: copy.deepcopy(training.model),
        ]
        told["a copy"] = [said(rank, act) for act in copies]
    loss = training.loss_of(STEPS)
    training.engine.backward(loss)
    if setup.accumulation == 1:
        training.engine.step()
    told["a loss twice"] = [said(rank, lambda: training.engine.backward(loss))]
    training.engine.zero_grad()
    weights = training.weights()
    training.engine.close()
    wrong += different(
        copy_of_weights(copy.deepcopy(training.model)), weights, "in a copy of the closed engine's module"
    )
    return trace, told, wrong


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except (GptparError, RuntimeError) as error:
        return str(error)
    return ""


def wrong_inside_gathered(training: Training) -> list[str]:
    """In a scope with states of parts, a forward and a backward pass, whose gradient is dropped."""
    wanted, model, wrong = training.trace.weights[-1], training.model, []
    with training.engine.gathered():
        for path in ("", "blocks", "blocks.1", "blocks.1.up", "last"):
            part = model.get_submodule(path)
            wrong += different(part.state_dict(prefix=f"{path}." if path else ""), wanted, f"in {path}")
        wrong += different(dict(model.named_parameters()), wanted, "after states")
        loss = training.loss_of(STEPS)
        wrong += different(dict(model.named_parameters()), wanted, "after forward")
        training.engine.backward(loss)
        wrong += different(dict(model.named_parameters()), wanted, "after backward")
    training.engine.zero_grad()
    return wrong


def different(state: Named, wanted: Named, when: str) -> list[str]:
    return [f"{name} {when}" for name in state if not torch.equal(state[name], wanted[name])]


SAID = {
    "a verb out of order": ".",
    "a loss from before a step": r"engine\.step\(\)",
    "a loss twice": "twice",
    "a copy": "save_checkpoint",
}


@each_of(SETUPS)
def test_what_has_no_meaning_is_refused_and_changes_nothing(bench: Bench, setup: Setup) -> None:
    """And parameters stay until the end of ``gathered``."""
    found = bench.on_ranks(setup.world, misused, setup)
    for _, told, wrong in found:
        assert wrong == []
        for what, sentence in SAID.items():
            assert all(re.search(sentence, one) for one in told[what]), (what, told[what])
    wanted = bench.reference("mlp", Setup(setup.world, accumulation=setup.accumulation, steps=STEPS))
    assert not problems(worst_of_ranks([trace for trace, *_ in found], wanted), 1e-10)


DROPPED = (
    "zero_grad() dropped a step after 1 of its 2 micro-batches, as it did with the step before. If it is called at "
    "every micro-batch, no step is ever taken: leave it out, the engine drops gradients after each step."
)


def dropped_at_every_micro_batch(rank: int, setup: Setup, by_optimizer: bool) -> tuple[int, list[tuple[str, str, str]]]:
    """(steps taken, warnings of zero_grad: sentence, file and line)"""
    training = Training(CASES["mlp"], setup)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for micro in range(4):
            if micro:
                (training.optimizer if by_optimizer else training.engine).zero_grad()
            training.engine.backward(training.loss_of(micro))
            training.engine.step()
    told = [one for one in warned if "zero_grad" in str(one.message)]
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in told]
    return training.engine.global_steps, [
        (str(one.message), Path(one.filename).name, line) for one, line in zip(told, lines, strict=True)
    ]


@pytest.mark.parametrize(("setup", "by_optimizer"), [(Setup(1, 0, 1.0, 2), False), (Setup(2, 2, 0.0, 2), True)])
def test_dropping_gradients_at_every_micro_batch_is_told_once(bench: Bench, setup: Setup, by_optimizer: bool) -> None:
    for steps, told in bench.on_ranks(setup.world, dropped_at_every_micro_batch, setup, by_optimizer):
        assert steps == 0
        assert told == [
            (DROPPED, "test_misused.py", "(training.optimizer if by_optimizer else training.engine).zero_grad()")
        ]


def on_meta() -> None:
    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return Mlp()

    Training(Case("empty", build), Setup())


def test_a_model_without_values_is_refused(bench: Bench) -> None:
    assert re.search(r"(?=.*first\.weight)(?=.*deferred_init)", bench.on_ranks(1, said, on_meta)[0])


# Errors of one process in initialize.


def other_config(rank: int) -> str:
    config: Any = "/nowhere.json" if rank == 1 else Setup(2).config(CASES["mlp"])
    return said(rank, lambda: initializer(GPTPAR)(model=Mlp(), config=config))


def other_scheduler(rank: int) -> str:
    def make(optimizer: Any) -> Any:
        if rank == 1:
            raise ValueError("no file of rates")
        return LambdaLR(optimizer, lambda step: 1.0)

    config = Setup(2, 3, 0.6).config(CASES["mlp"])
    return said(rank, lambda: initializer(GPTPAR)(model=Mlp().double(), lr_scheduler=make, config=config))


@pytest.mark.parametrize("act", [other_config, other_scheduler], ids=named)
def test_an_error_of_one_process_is_raised_on_all_with_its_rank(bench: Bench, act: Any) -> None:
    first, second = bench.on_ranks(2, act)
    assert first == second and "rank 1" in first, (first, second)


# Processes that do not make the same calls end with a sentence about it, at every ZeRO stage.


def save_alone(rank: int, stage: int, behind: int, folder: str) -> str:
    """Train; the first process alone saves, ``behind`` steps before its last one. Returns the error."""
    order_watch.LOOK_SECONDS_WITHOUT_UNITS = 0.3
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    engine, *_ = gptpar.initialize(model=model, config=engine_config(stage))
    try:
        for step in range(STEPS + (rank > 0)):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            if rank == 0 and step == STEPS - 1 - behind:
                engine.save_checkpoint(folder)
    except GptparError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("stage", "behind"), [(0, 1), (1, 0), (2, 1)])
def test_a_save_of_one_process_alone_is_told(tmp_path: Path, stage: int, behind: int) -> None:
    told = (
        f"processes wait for each other in step {STEPS + 1 - behind}, because they have made different calls: after 0 "
        f"equal calls, rank 0 is at engine.save_checkpoint(), rank 1 is at a backward pass. The run cannot go on: end "
        f"it. {order_watch.ALL_CALL}"
    )
    assert spawn(save_alone, 2, stage, behind, str(tmp_path)) == [told, told]
    assert not list(tmp_path.glob("iter_*"))


def save_or_train(rank: int, folder: str) -> None:
    """The first stage of a pipeline saves while the last one begins another step, and waits inside of its transfers."""
    order_watch.LOOK_SECONDS_WITHOUT_UNITS, order_watch.LEFT_TO_RAISE_SECONDS = 0.3, 1.0
    engine, *_ = gptpar.initialize(model=layers(), loss_fn=loss_of, config=Divided(2, 2).config())
    data = data_of(engine)
    engine.train_batch(data)
    sys.stderr = Path(folder, f"rank{rank}").open("w")  # noqa: SIM115 - until the process ends
    engine.save_checkpoint(folder) if rank == 0 else engine.train_batch(data)


def test_a_stage_that_saves_alone_is_told_before_its_process_ends(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        spawn(save_or_train, 2, str(tmp_path))
    told = "after 0 equal calls, rank 0 is at engine.save_checkpoint(), rank 1 is at engine.train_batch(). The run"
    assert any(told in path.read_text() for path in tmp_path.glob("rank*"))


def freeze_alone(rank: int) -> tuple[str, bool]:
    """Freeze a parameter on one process alone and step; returns the error, and whether the weights are unchanged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    engine, *_ = gptpar.initialize(model=model, config=engine_config())
    before = [p.detach().clone() for p in model.parameters()]
    model[0].bias.requires_grad_(rank == 0)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    told = said(rank, engine.step)
    return told, all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_parameter_that_is_frozen_on_one_process_alone_is_told() -> None:
    told = (
        "step 1 was not taken: requires_grad of 1 parameter(s), 0.bias among them, is not the same on all processes: "
        "freeze the same parameters on each."
    )
    assert spawn(freeze_alone, 2) == [(told, True), (told, True)]
