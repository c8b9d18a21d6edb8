"""Torch's stance towards compiled code is as it was, however the first passes of engines overlap and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gptpar
from gptpar.any_module.engine import ModuleEngine


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def make_engine() -> ModuleEngine:
    """Its parameters come and go, so its first pass is watched."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    return gptpar.initialize(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), config=config)[0]


@pytest.fixture(autouse=True)
def _stance_of_the_others() -> Iterator[None]:
    assert stance() == "default"
    yield
    assert stance() == "default"


def test_from_the_first_forward_to_its_backward() -> None:
    engine = make_engine()
    loss = engine(torch.ones(2, 3)).sum()
    assert stance() == "force_eager"
    engine.backward(loss)
    assert stance() == "default"
    engine.step()
    engine(torch.ones(2, 3))
    assert stance() == "default"
    engine.close()


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


def test_forward_without_backward() -> None:
    engine = make_engine()
    engine(torch.ones(2, 3))
    assert stance() == "force_eager"
    engine.close()
    assert stance() == "default"


def test_errors() -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 4))
    assert stance() == "default"
    loss = engine(torch.ones(2, 3)).sum()
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    assert stance() == "default"
    engine.close()


def test_the_users_stance_is_restored() -> None:
    engine = make_engine()
    with torch.compiler.set_stance("eager_on_recompile"):
        loss = engine(torch.ones(2, 3)).sum()
        assert stance() == "force_eager"
        engine.backward(loss)
        assert stance() == "eager_on_recompile"
    engine.close()
