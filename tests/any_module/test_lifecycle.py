"""What users do beside training: the engine goes on with the same numbers, or says what is wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from gptpar.errors import GptparError
from tests.any_module import scenarios
from tests.any_module.case import Setup
from tests.any_module.harness import CASES, Training
from tests.any_module.matrix import Bench
from tests.any_module.rank_pool import RanksFailed

SETUPS = [Setup(1, 0, 0.0, 2, steps=6), Setup(1, 3, 0.6, steps=6), Setup(2, 2, 0.0, 2, steps=6)]
SETUPS += [Setup(2, 3, 0.6, 2, steps=6)]
layouts = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))


@layouts
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (scenarios.ForwardFails, "raises"),
        (scenarios.ForwardWithoutBackward, "mlp"),
        (scenarios.EvaluatesBetween, "mlp"),
        (scenarios.GradientsAreZeroed, "mlp"),
        (scenarios.NoSync, "mlp"),
        (scenarios.UsersScheduler, "falling_rate"),
        (scenarios.RatesByHand, "falling_rate"),
        (scenarios.LoadsWeights, "mlp"),
        (scenarios.CopiesState, "mlp"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
def test_training_stays_the_same(bench: Bench, kind: type[Training], name: str, setup: Setup) -> None:
    bench.check(name, setup, kind)


@layouts
def test_train_batch_is_the_loop(bench: Bench, setup: Setup) -> None:
    wanted = bench.reference("loss_inside", setup)
    (got, *_) = bench.train("loss_inside", setup, scenarios.TrainsByBatch)
    torch.testing.assert_close(got.losses, wanted.losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(got.norms, wanted.norms, rtol=1e-10, atol=0)
    for mine, theirs in zip(got.weights, wanted.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@layouts
def test_loaded_without_gathering_weights_count_or_are_refused(bench: Bench, setup: Setup) -> None:
    try:
        bench.check("mlp", setup, scenarios.LoadsWeightsWithoutGathering)
    except RanksFailed as failed:
        assert all("GptparError" in report and "gathered" in report for report in failed.reports), failed


def state_of(rank: int, setup: Setup, engine: str) -> list[str]:
    """What is wrong with the model's state after two steps, read without ``gathered``."""
    training = Training(CASES["mlp"], setup, engine)
    trace = training.run(0, 2)
    try:
        state = training.model.state_dict()
        wrong = [name for name, value in trace.weights[-1].items() if not torch.equal(state[name], value)]
    except GptparError as refused:
        wrong = [] if "gathered" in str(refused) else [str(refused)]
    training.engine.close()
    return wrong


@layouts
def test_state_dict_is_whole_or_refused(bench: Bench, setup: Setup) -> None:
    assert bench.on_ranks(setup.world, state_of, setup, bench.engine) == [[]] * setup.world


def closes(rank: int, setup: Setup, engine: str, place: str) -> str:
    """Closes within a step; returns what a step says after that."""
    training = Training(CASES["mlp"], setup, engine)
    training.run(0, 1)
    batch = training.make_batch(1, 0)
    if place != "before forward":
        loss = training.case.losses_of(training.engine, batch)[0]
        if place == "after backward":
            training.engine.backward(loss)
    training.engine.close()
    training.engine.close()
    return _said(lambda: training.engine(batch["x"]))


@layouts
@pytest.mark.parametrize("place", ["before forward", "after forward", "after backward"])
def test_closing_within_a_step(bench: Bench, setup: Setup, place: str) -> None:
    """It returns, again too, and a new engine works in the same processes."""
    for said in bench.on_ranks(setup.world, closes, setup, bench.engine, place):
        assert said == "" or "close" in said.lower(), said
    bench.check("mlp", setup)


def evaluates(rank: int, setup: Setup, engine: str) -> tuple[float, float]:
    """(eval_batch's loss, that of the initial weights), averaged over ranks."""
    from tests.any_module.reference import mean_over_ranks

    training = Training(CASES["loss_inside"], setup, engine)
    batches = [training.make_batch(9, micro) for micro in range(setup.accumulation)]
    got = training.engine.eval_batch(iter([(batch["x"], batch["y"]) for batch in batches]))
    plain = training.case.make_model()
    wanted = sum(training.case.losses_of(plain, batch)[0].item() for batch in batches) / len(batches)
    assert not got.requires_grad
    training.engine.close()
    return mean_over_ranks(float(got)), mean_over_ranks(wanted)


@pytest.mark.parametrize("setup", [Setup(1, 0), Setup(1, 3, 0.6, 2), Setup(2, 3, 0.6)], ids=str)
def test_eval_batch_is_the_mean_loss(bench: Bench, setup: Setup) -> None:
    for got, wanted in bench.on_ranks(setup.world, evaluates, setup, bench.engine):
        assert got == pytest.approx(wanted, rel=1e-12)


def out_of_order(rank: int, setup: Setup, engine: str, what: str) -> str:
    """What is said when verbs come in an order that has no meaning."""
    training = Training(CASES["mlp"], setup, engine)
    acts: dict[str, Any] = {
        "step without backward": training.engine.step,
        "backward of a loss without a graph": lambda: training.engine.backward(torch.zeros(())),
        "backward of a vector": lambda: training.engine.backward(training.engine(training.make_batch(0, 0)["x"])),
    }
    said = _said(acts[what])
    with suppress(Exception):
        training.engine.close()
    return said


@pytest.mark.parametrize("setup", [Setup(1, 0), Setup(2, 3, 0.6)], ids=str)
@pytest.mark.parametrize(
    "what", ["step without backward", "backward of a loss without a graph", "backward of a vector"]
)
def test_verbs_out_of_order_are_refused(bench: Bench, setup: Setup, what: str) -> None:
    assert all(bench.on_ranks(setup.world, out_of_order, setup, bench.engine, what))


def _said(act: Any) -> str:
    try:
        act()
    except (GptparError, RuntimeError) as error:
        return str(error)
    return ""
