"""Engines to save and load, steps of them, and all that a checkpoint must keep."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR, SequentialLR

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine
from tests.any_module.case import engine_config
from tests.any_module.zoo import Mlp

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 0}}}
LAYOUTS = ("ZeRO-0", "ZeRO-3, CPU 0.6", "ZeRO-2, CPU 1")


def make(
    model: nn.Module,
    layout: str = "ZeRO-0",
    *,
    precision: str = "fp32",
    accumulation: int = 1,
    host_parameters: bool = False,
    groups: Any = None,
    scheduler: Any = None,
    **more: Any,
) -> ModuleEngine:
    stage, _, ratio = layout.removeprefix("ZeRO-").partition(", CPU ")
    config = engine_config(int(stage), float(ratio or 0), accumulation, **PRECISIONS[precision], **more)
    if host_parameters:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return gptpar.initialize(model=model, config=config, model_parameters=groups, lr_scheduler=scheduler)[0]


def mlp(seed: int = 0, width: int = 16) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(width)


def train(engine: ModuleEngine, start: int, stop: int) -> list[float]:
    """Steps with data of their own; the losses."""
    losses = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        for _ in range(engine.options.batch.accumulation_steps):
            x = torch.randn(2, 16, generator=generator).to(engine.options.dtype or torch.float32)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def state(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    """Copies of master weights and moments, buffers and parameters."""
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    found = {f"{kind}/{name}": engine.weights.whole(name, kind) for kind in kinds for name in names}
    return found | {name: value.clone() for name, value in engine.module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_go_on_alike(loaded: ModuleEngine, saved: ModuleEngine, start: int, stop: int) -> None:
    """They have one state, and so they do after further steps, to the bit; closes both."""
    assert_same(state(loaded), state(saved))
    assert train(loaded, start, stop) == train(saved, start, stop)
    assert_same(state(loaded), state(saved))
    loaded.close()
    saved.close()


def warmed(optimizer: torch.optim.Optimizer) -> LRScheduler:
    steps = [LambdaLR(optimizer, lambda step: 0.5), MultiStepLR(optimizer, [1, 2, 2], gamma=0.3)]
    return SequentialLR(optimizer, steps, milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [1, 4, 4, 5], gamma=0.3),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=12),
    "SequentialLR": warmed,
}
