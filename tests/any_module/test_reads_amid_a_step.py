"""Gradients that are read amid a step: refused within a pass or ``train_batch``, and later changes of weights count."""

from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.errors import GptparError


class Squares(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def make(stage: int = 0, ratio: float = 0.0) -> ModuleEngine:
    torch.manual_seed(0)
    model = Squares(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
    }
    if not ratio:
        del config["zero_optimization"]["offload_optimizer"]
    return gptpar.initialize(model=model, config=config)[0]


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_read_within_a_pass_is_refused(stage: int) -> None:
    engine = make(stage)
    output = engine(batch(0))
    output.register_hook(lambda grad: (engine.full_gradient("0.weight"), None)[1])
    with pytest.raises(GptparError, match="not within a pass or train_batch"):
        engine.backward(output)
    engine.close()


def test_a_read_within_train_batch_is_refused_and_its_step_hooks_may_read() -> None:
    engine, seen = make(), []
    reading = engine.module[2].register_forward_pre_hook(lambda *_: (engine.full_gradient("0.weight"), None)[1])
    with pytest.raises(GptparError, match="not within a pass or train_batch"):
        engine.train_batch(iter([batch(0), batch(1)]))
    reading.remove()
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(engine.full_gradient("0.weight")))
    wanted = torch.autograd.grad(sum(engine.module(batch(number)) / 2 for number in range(2)), engine.module[0].weight)[
        0
    ]
    engine.train_batch(iter([batch(0), batch(1)]))
    torch.testing.assert_close(seen[0], wanted, rtol=1e-12, atol=1e-14)
    engine.close()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_weights_changed_after_a_read_count(ratio: float) -> None:
    found = []
    for reads in (False, True):
        engine = make(ratio=ratio)
        engine.backward(engine(batch(0)))
        if reads:
            engine.full_gradient("0.weight")
        engine.step()
        with torch.no_grad():
            engine.module[0].weight.mul_(0.5)
        engine.backward(engine(batch(1)))
        engine.step()
        with engine.gathered():
            found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.close()
    assert all(map(torch.equal, *found))
