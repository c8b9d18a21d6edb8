"""What users do beside training: the engine goes on with the same numbers, or says what is wrong."""

from contextlib import suppress
from typing import Any

import pytest
import torch

from gptpar.errors import GptparError
from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.layouts import covering, fitting
from tests.any_module.matrix import Bench
from tests.any_module.scenarios import SCENARIOS

SETUPS = [Setup(1, 0, 0.0, 2, steps=4), Setup(1, 3, 0.6, steps=4), Setup(2, 2, 0.0, 2, steps=4)]
SETUPS += [Setup(2, 3, 0.6, 2, steps=4)]
# Others are in files of their own: test_checkpoint.py and test_closed.py.
NAMES = [name for name, case in SCENARIOS.items() if not case.resumed and name != "trained_on_in_another_engine"]


@pytest.mark.parametrize(("name", "setup"), covering(NAMES, SETUPS))
def test_training_stays_the_same(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, fitting(SCENARIOS[name], setup))


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


def replaced(rank: int, setup: Setup) -> tuple[list[str], list[float]]:
    """(what is said of wrong calls, losses of two steps of the former engine and one of the new one)"""
    import gptpar.deepspeed as deepspeed

    model, config = CASES["mlp"].make_model(), setup.config(CASES["mlp"])
    wrong = {**config, "optimizer": {"type": "AdamWrong"}} if rank == setup.world - 1 else config
    foreign = [*model.parameters(), torch.nn.Parameter(torch.zeros(1))]
    another = model if rank else CASES["mlp"].make_model()
    former: Any = deepspeed.initialize(model=model, config=config)[0]
    losses = [loss_of_step(former, setup, 0, rank)]
    said = [
        _said(lambda: deepspeed.initialize(model=model, config=wrong)),
        _said(lambda: deepspeed.initialize(model=model, config=config, model_parameters=foreign)),
        _said(lambda: deepspeed.initialize(model=another, config=config)) if setup.world > 1 else "",
    ]
    losses.append(loss_of_step(former, setup, 1, rank))
    new: Any = deepspeed.initialize(model=model, config=config)[0]
    assert former.is_closed and not new.is_closed
    losses.append(loss_of_step(new, setup, 2, rank))
    new.close()
    return said, losses


def loss_of_step(engine: Any, setup: Setup, step: int, rank: int) -> float:
    (loss,) = CASES["mlp"].losses_of(engine, CASES["mlp"].make_batch(step, 0, rank, setup.world))
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.filterwarnings("ignore:this model has an engine already")
@pytest.mark.parametrize("setup", [Setup(1, 0), Setup(2, 3, 0.6)], ids=str)
def test_a_former_engine_is_closed_when_all_is_checked(bench: Bench, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, replaced, setup)
    for said, _ in found:
        assert "AdamWrong" in said[0] and "not among the model's parameters" in said[1]
        assert setup.world == 1 or "whether an engine has the model already is False" in said[2]
    means = [sum(some) / len(found) for some in zip(*(losses for _, losses in found), strict=True)]
    assert means == pytest.approx(bench.reference("mlp", setup).losses[:3], rel=1e-10)
