"""Parameters that a backward pass reads after it has formed their gradient: autograd does not order these reads."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.any_module.case import WIDTH, Case
from tests.any_module.zoo import Mlp

SECONDS = 0.01
"""An optimizer that works ahead has updated a gradient of these models by then."""


class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return dy


class DetachedFirst(nn.Module):
    """Its weight is used twice: the first time, which is the last in the backward pass, it is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(F.linear(x, self.detached()))
        return x + F.linear(Slow.apply(y), self.weight)

    def detached(self) -> torch.Tensor:
        """[WIDTH, WIDTH] the weight, which autograd saves for the backward pass."""
        return self.weight.detach()


class DetachedFirstOnLastRank(DetachedFirst):
    """On other processes autograd saves a copy of the weight, so that the backward pass does not read it late."""

    def detached(self) -> torch.Tensor:
        weight = super().detached()
        return weight if dist.get_rank() == dist.get_world_size() - 1 else weight.clone()


class DetachedInBlocks(nn.Module):
    """Such blocks; ``reentrant``: they are recomputed, ``None``: they are not."""

    def __init__(self, reentrant: bool | None = None, block: Callable[[], nn.Module] = DetachedFirst) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.aimed(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)

    def aimed(self, x: torch.Tensor) -> torch.Tensor:
        """[..., WIDTH] -> the same, seen by the last block too, without a gradient of its weight."""
        if self.reentrant is None:
            return self.first(x)
        return checkpoint(self._aimed, x.clone().requires_grad_(), use_reentrant=self.reentrant)

    def _aimed(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.blocks[2](x)
        return self.first(x) * torch.sigmoid(aim)


class DetachedOfAnotherBlock(Mlp):
    """The last block's weight is read at the beginning."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x) @ self.blocks[2].up.weight.detach()[:WIDTH])
        for block in self.blocks:
            x = Slow.apply(block(x))
        return self.last(x)


class HookReads(Mlp):
    """A gradient is scaled by weights whose gradients are there already; ``from_call``: not in the calls before."""

    def __init__(self, from_call: int = 0) -> None:
        super().__init__()
        self.calls, self.from_call = 0, from_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.requires_grad and self.calls >= self.from_call:
            x.register_hook(self._scaled)
        self.calls += 1
        for block in self.blocks:
            x = Slow.apply(block(x))
        return self.last(x)

    def _scaled(self, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        size = self.last.weight.detach().square().sum() + self.blocks[2].up.weight.detach().sum()
        return grad * (1 + size)


LATE_READS = [
    Case("detached_weight_read_late", DetachedInBlocks),
    Case("detached_weight_read_late_recomputed", partial(DetachedInBlocks, False)),
    Case("detached_weight_read_late_recomputed_reentrant", partial(DetachedInBlocks, True)),
    Case("other_blocks_weight_read_late", DetachedOfAnotherBlock),
]
