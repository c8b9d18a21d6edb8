"""A model in two parameter groups, trained by any optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gptpar import TwinFlowAdamW

WIDTH = 24


class Model(nn.Module):
    """Modules with parameters of their own inside others; one parameter that not every forward uses."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.sometimes = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(7))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        self.to(dtype)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = self.third(torch.tanh(self.second(torch.relu(self.norm(self.first(x))))))
        return x.square().mean() + (self.sometimes.square().sum() if use else 0)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "lr": 3e-2, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def inputs(step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.9**step)


def backward(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """The last one before a step."""
    attached = isinstance(optimizer, TwinFlowAdamW) and optimizer.attached
    with optimizer.last_backward() if attached else nullcontext():  # type: ignore[attr-defined]
        loss.backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], schedule: Any = None, clip: float = 0.0
) -> None:
    """Two micro-batches a step; every third step leaves one parameter without gradient."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        one, other = inputs(step, dtype)
        optimizer.zero_grad()
        model(one, use=step % 3 != 0).backward()
        backward(optimizer, model(other, use=step % 3 != 0))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def equal(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda words, name=name: f"{name}: {words}", **tolerance)


class Beside:
    """A model that torch's AdamW trains, and its like that TwinFlowAdamW does."""

    def __init__(self, *, attached: bool = False, **options: Any):
        self.plain, self.ours = Model(), Model()
        self.reference = torch.optim.AdamW(two_groups(self.plain), lr=1e-2)
        self.optimizer = TwinFlowAdamW(two_groups(self.ours), lr=1e-2, **options)
        if attached:
            self.optimizer.attach(self.ours)

    def each(self) -> Iterator[tuple[Model, torch.optim.Optimizer]]:
        yield self.plain, self.reference
        yield self.ours, self.optimizer

    def train(self, steps: Sequence[int]) -> None:
        for model, optimizer in self.each():
            train(model, optimizer, steps)

    def assert_equal(self) -> None:
        self.optimizer.finish()
        equal(self.ours, self.plain, rtol=1e-12, atol=1e-12)

    def close(self) -> None:
        self.optimizer.close()
