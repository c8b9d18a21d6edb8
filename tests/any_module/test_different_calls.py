"""Processes that do not make the same calls of an engine end with a sentence about it, at every ZeRO stage."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.guards import order_watch
from gptpar.errors import GptparError
from tests.any_module.pipeline_layers import Divided, data_of, layers, loss_of
from tests.spawn import spawn

STEPS = 2


def save_alone(rank: int, stage: int, behind: int, folder: str) -> str:
    """Some steps, of which the first process takes fewer, and a save of the first process alone, before the others end.

    Returns:
        The error.
    """
    order_watch.LOOK_SECONDS_WITHOUT_UNITS = 0.3
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = gptpar.initialize(model=model, config=config)
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
    """(the error of a step in which one process alone has frozen a parameter, whether it changed nothing)"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    engine, *_ = gptpar.initialize(model=model, config=config)
    before, told = [p.detach().clone() for p in model.parameters()], "no error"
    model[0].bias.requires_grad_(rank == 0)
    try:
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        engine.step()
    except GptparError as error:
        told = str(error)
    return told, all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_parameter_that_is_frozen_on_one_process_alone_is_told() -> None:
    told = (
        "step 1 was not taken: requires_grad of 1 parameter(s), 0.bias among them, is not the same on all processes: "
        "freeze the same parameters on each."
    )
    assert spawn(freeze_alone, 2) == [(told, True), (told, True)]
