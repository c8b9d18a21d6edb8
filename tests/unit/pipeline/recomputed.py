"""A layer that is recomputed, and its gradients."""

from typing import Any

import numpy as np
import torch
from torch import nn

from gptpar.pipeline.recompute import Keep, recomputed


class FromArray(torch.autograd.Function):
    """A tensor that needs a gradient, in an array's memory: the array lives as long as anyone holds that memory."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def layer(dropout: float = 0.25) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8)).double()


def gradients(model: nn.Module, keep: Keep | None) -> list[torch.Tensor]:
    """The output and every gradient of two recomputed calls in a row; without recomputation for ``None``."""
    torch.manual_seed(1)
    source = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    x = source * 2
    torch.manual_seed(2)
    for _ in range(2):
        x = model(x) if keep is None else recomputed(model, x, keep=keep)
    torch.rand(())  # the backward pass must not depend on where the random numbers have got to
    return [x.detach(), *torch.autograd.grad(x.square().sum(), [source, *model.parameters()])]
