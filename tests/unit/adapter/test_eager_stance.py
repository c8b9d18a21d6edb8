"""Torch's stance towards compiled code is as it was, however the first passes of engines overlap and end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def make_engine(accumulation: int = 1, **given: Any) -> ModuleEngine:
    """Its parameters come and go, so its first pass is watched."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    config = {**sizes, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    return gptpar.initialize(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), config=config, **given)[0]


def loss_of(engine: ModuleEngine) -> torch.Tensor:
    loss: torch.Tensor = engine(torch.ones(2, 3)).sum()
    return loss


def is_observed(engine: ModuleEngine) -> bool:
    """Whether the next backward pass is observed, which it is exactly while code runs uncompiled."""
    assert (stance() == "force_eager") == engine._stage.observes_backward
    return engine._stage.observes_backward


@pytest.fixture(autouse=True)
def _stance_of_the_others() -> Iterator[None]:
    assert stance() == "default"
    yield
    assert stance() == "default"


def test_first_passes_that_overlap() -> None:
    first, second = make_engine(), make_engine()
    middle = first(torch.ones(2, 3))
    loss = second(middle.detach()).sum()
    first.backward(middle.sum())
    assert stance() == "force_eager"
    second.backward(loss)
    assert stance() == "default"
    for engine in (first, second):
        engine.close()


def test_the_users_stance_is_restored_after_passes_errors_and_a_forward_pass_alone() -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 4))
    assert stance() == "default"
    loss = loss_of(engine)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    assert stance() == "default"
    with torch.compiler.set_stance("eager_on_recompile"):
        loss = loss_of(engine)
        assert stance() == "force_eager"
        engine.backward(loss)
        assert stance() == "eager_on_recompile"
    engine.close()
    engine = make_engine()
    engine(torch.ones(2, 3))
    assert stance() == "force_eager"
    engine.close()


def test_of_an_accumulation_the_first_micro_batch_is_observed() -> None:
    engine, observed = make_engine(3), []
    for _ in range(4):
        loss = loss_of(engine)
        observed.append(is_observed(engine))
        engine.backward(loss)
        observed.append(is_observed(engine))  # another loss of this micro-batch may follow
        engine.step()
        observed.append(is_observed(engine))
    assert observed == [True, True] + [False] * 10 and engine.global_steps == 1
    engine.close()


def test_of_a_batch_the_first_micro_batch_is_observed() -> None:
    stances = []

    def noted(y: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        stances.append(stance())
        y.register_hook(lambda _: stances.append(stance()))
        return y.sum()

    engine = make_engine(3, loss_fn=noted)
    engine.train_batch(iter([torch.ones(2, 3)] * 3))
    assert stances == 2 * ["force_eager"] + 4 * ["default"]


def test_two_forward_passes_before_their_backward_passes() -> None:
    """What ran uncompiled is recomputed uncompiled; two passes of one loss are observed to the end of the step."""
    apart, together = make_engine(3), make_engine(2)
    observed = []
    for loss in [loss_of(apart), loss_of(apart)]:
        apart.backward(loss)
        apart.step()
        observed.append(is_observed(apart))
    apart.close()
    for _ in range(2):
        together.backward(loss_of(together) + loss_of(together))
        together.step()
        observed.append(is_observed(together))
    assert observed == [True, False, True, False]
    together.close()


def test_a_step_that_is_dropped_is_observed_no_more() -> None:
    for drop in (ModuleEngine.zero_grad, lambda engine: engine.optimizer.zero_grad()):
        engine = make_engine(3)
        drop(engine)
        loss = loss_of(engine)
        drop(engine)  # as scripts do between a forward and its backward pass
        assert is_observed(engine)
        engine.backward(loss)
        assert is_observed(engine)
        drop(engine)
        assert not is_observed(engine)
        engine.close()
