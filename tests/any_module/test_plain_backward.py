"""Backward passes that the user begins, gradients in ``.grad``, and those that are read, against plain torch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.errors import GptparError
from tests.any_module.case import Setup, engine_config
from tests.any_module.layouts import covering, each_of
from tests.any_module.matrix import Bench
from tests.any_module.scenarios.beside import LossBackward, ReadsGradientsSoFar

STEPS = 3
NAMES = [
    "mlp",
    "two_backward_calls_of_one_graph",
    "detached_weight_read_late_recomputed",
    "detached_weight_read_late_recomputed_reentrant",
    "other_blocks_weight_read_late",
    "recomputed_reentrant",
]
SETUPS = [
    Setup(1, 0, 1.0, accumulation=3, steps=STEPS),
    Setup(2, 0, 0.0, accumulation=2, steps=STEPS),
    Setup(2, 3, 0.6, accumulation=3, steps=STEPS),
]


@pytest.mark.parametrize(("name", "setup"), covering(NAMES, SETUPS))
def test_a_loss_may_go_backward_without_the_engine(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, setup, LossBackward)


@each_of([SETUPS[0], Setup(2, 0, 0.0, accumulation=3, steps=STEPS), Setup(2, 1, 0.6, 2, steps=STEPS), SETUPS[2]])
def test_gradients_may_be_read_after_each_micro_batch(bench: Bench, setup: Setup) -> None:
    bench.check("mlp", setup, ReadsGradientsSoFar)


CLIP, LR, ACCUMULATION = 0.05, 0.1, 3


class Squares(nn.Sequential):
    """Returns its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


def make(*, stage: int = 0, ratio: float = 0.0, accumulation: int = 1, **more: Any) -> ModuleEngine:
    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    config = engine_config(stage, ratio, accumulation, optimizer=optimizer, gradient_clipping=0.0, **more)
    return gptpar.initialize(model=Squares(), config=config)[0]


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def change(parameters: list[nn.Parameter]) -> float:
    """What a user does with gradients: clips them, replaces one, drops one."""
    norm = nn.utils.clip_grad_norm_(parameters, CLIP)
    first, second = parameters[:2]
    assert first.grad is not None
    first.grad = 2 * first.grad
    second.grad = None
    return norm.item()


def in_plain_torch(ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    model, norms = Squares(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for number in range(ACCUMULATION * ranks):
            (model(batch(100 * step + number)) / (ACCUMULATION * ranks)).backward()
        norms.append(change(list(model.parameters())))
        for p in model.parameters():  # the engine updates a parameter without gradient, too
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    return norms, [p.detach() for p in model.parameters()]


def by_engine(rank: int, ranks: int, plain: bool) -> tuple[list[float], list[torch.Tensor]]:
    engine, norms = make(accumulation=ACCUMULATION), []
    for step in range(STEPS):
        for number in range(ACCUMULATION):
            loss = engine(batch(100 * step + number * ranks + rank))
            if plain:
                loss.backward()
            else:
                assert engine.backward(loss).item() == loss.item() / ACCUMULATION
            if number == ACCUMULATION - 1:
                norms.append(change(list(engine.parameters())))
            engine.step()
        assert all(p.grad is None for p in engine.parameters())
    engine.close()
    return norms, [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_in_grad_without_zero(bench: Bench, ranks: int, plain: bool) -> None:
    wanted_norms, wanted = in_plain_torch(ranks)
    for norms, weights in bench.on_ranks(ranks, by_engine, ranks, plain):
        assert norms == pytest.approx(wanted_norms, rel=1e-12)
        for got, want in zip(weights, wanted, strict=True):
            assert torch.allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("by", ["boundary", "no_sync", "final"])
def test_sums_of_16_bit_gradients_get_memory_when_they_are_needed(by: str, ratio: float) -> None:
    """Accumulation 1: a boundary before every backward pass, ``no_sync`` and a second pass give fp32 sums."""
    engine = make(ratio=ratio, bf16={"enabled": True})
    model = engine.module
    losses = [lambda number=number: engine(batch(number).bfloat16()) for number in range(2)]
    total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for loss in losses:
        found = torch.autograd.grad(loss(), list(model.parameters()))
        for into, grad in zip(total.values(), found, strict=True):
            into += grad.float()
    if by == "boundary":
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(losses[0]())
        assert engine.engine.gradients.memory.shard.dtype == torch.bfloat16
        assert ratio or model[0].weight.grad.dtype == torch.bfloat16
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(losses[0]())
        engine.set_gradient_accumulation_boundary(True)
    else:
        with engine.no_sync() if by == "no_sync" else nullcontext():
            engine.backward(losses[0]())
    engine.backward(losses[1]())
    assert all(torch.equal(engine.full_gradient(name), value) for name, value in total.items())
    before = {name: engine.weights.whole(name, "weights") for name in total}
    engine.step()
    for name, value in total.items():  # the first step of Adam has the length of the learning rate
        stepped = before[name] * (1 - LR * 0.01) - LR * value / (value.abs() + 1e-8)
        assert torch.allclose(engine.weights.whole(name, "weights"), stepped, rtol=1e-6, atol=1e-7)
    assert engine.global_steps == 1
    engine.close()


def test_a_plain_backward_pass_that_is_refused_or_fails() -> None:
    engine = make(fp16={"enabled": True, "loss_scale": 8})
    model, x = engine.module, batch(0).half()
    with pytest.raises(GptparError, match=r"engine.scale\(loss\).backward\(\) or engine.backward"):
        engine(x).backward()
    loss = engine(x)
    with pytest.raises(ZeroDivisionError):
        handle = model[0].weight.register_hook(lambda grad: 1 / 0)
        engine.scale(loss).backward()
    handle.remove()
    engine.scale(engine(x)).backward()
    wanted = torch.autograd.grad(8 * engine(x), list(model.parameters()))
    for (name, p), grad in zip(model.named_parameters(), wanted, strict=True):
        assert torch.equal(p.grad, grad) and torch.equal(engine.full_gradient(name), grad.float() / 8)
    engine.step(lr_kwargs={})
    assert engine.global_steps == 1
    engine.close()


# Gradients that are read amid a step: refused within a pass or train_batch, and later changes of weights count.


def read(engine: ModuleEngine) -> None:
    engine.full_gradient("0.weight")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_read_within_a_pass_is_refused(stage: int) -> None:
    engine = make(stage=stage)
    output = engine(batch(0))
    output.register_hook(lambda grad: read(engine))
    with pytest.raises(GptparError, match="not within a pass or train_batch"):
        engine.backward(output)
    engine.close()


def test_a_read_within_train_batch_is_refused_and_its_step_hooks_may_read() -> None:
    engine, seen = make(accumulation=2), []
    reading = engine.module[2].register_forward_pre_hook(lambda *_: read(engine))
    with pytest.raises(GptparError, match="not within a pass or train_batch"):
        engine.train_batch(iter([batch(0), batch(1)]))
    reading.remove()
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(engine.full_gradient("0.weight")))
    loss = sum(engine.module(batch(number)) / 2 for number in range(2))
    (wanted,) = torch.autograd.grad(loss, engine.module[0].weight)
    engine.train_batch(iter([batch(0), batch(1)]))
    torch.testing.assert_close(seen[0], wanted, rtol=1e-12, atol=1e-14)
    engine.close()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_weights_changed_after_a_read_count(ratio: float) -> None:
    found = []
    for reads in (False, True):
        engine = make(ratio=ratio, accumulation=2)
        engine.backward(engine(batch(0)))
        if reads:
            read(engine)
        engine.step()
        with torch.no_grad():
            engine.module[0].weight.mul_(0.5)
        engine.backward(engine(batch(1)))
        engine.step()
        with engine.gathered():
            found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.close()
    assert all(map(torch.equal, *found))
