"""The user's own ``clip_grad_norm_`` clips where gradients are in ``.grad``, and is refused elsewhere."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gptpar
from gptpar.errors import GptparError

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def after_backward(section: dict[str, Any], model: nn.Module) -> Any:
    engine = gptpar.initialize(model=model, config=CONFIG | section)[0]
    backward(engine)
    return engine


def backward(engine: Any) -> None:
    inputs = torch.ones(4, 4, dtype=engine.module.weight.dtype)
    for number in range(engine.gradient_accumulation_steps()):
        if number:
            engine.step()
        engine.backward(engine(inputs).square().sum() * 100)


@pytest.mark.parametrize(
    "section",
    [
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3}},
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    ],
)
def test_it_is_refused_where_it_would_change_nothing(section: dict[str, Any]) -> None:
    """Also of a list that was made beforehand, which knows no engine; the engine goes on afterwards."""
    model, plain = linear(), linear()
    parameters = list(model.parameters())
    engine, untouched = after_backward(section, model), after_backward(section, plain)
    trained = filter(lambda p: p.requires_grad, engine.parameters())
    for clip in (
        lambda: clip_grad_norm_(engine.parameters(), 0.1),
        lambda: clip_grad_norm_(parameters, 0.1),
        lambda: clip_grad_value_(trained, 0.1),
    ):
        with pytest.raises(GptparError, match="would change nothing: .* Set gradient_clipping in the configuration"):
            clip()
    model.eval()(torch.ones(4, 4, dtype=model.weight.dtype))  # the step's gradient is not lost
    engine.step()
    untouched.step()
    for one in (engine, untouched):
        backward(one)
        one.zero_grad()
        backward(one)
        one.step()
        one.close()
    assert all(type(p) is nn.Parameter for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))
    assert clip_grad_norm_(engine.parameters(), 0.1) == 0


def test_it_clips_where_gradients_are_shown() -> None:
    engine = after_backward({"zero_optimization": {"stage": 0}}, linear())
    assert clip_grad_norm_(engine.parameters(), 0.125) > 100
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(0.125, rel=1e-4)
