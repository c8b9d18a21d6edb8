"""Normalisation layers."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.init import Constant, Init


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016) over the last dimension, with weight and bias."""

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.init: dict[str, Init] = {"weight": Constant(1.0), "bias": Constant(0.0)}
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) over the last dimension, with weight."""

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.init: dict[str, Init] = {"weight": Constant(1.0)}
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.rms_norm(x, cast(list[int], self.weight.shape), self.weight, self.eps)


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """``kind`` is ``LayerNorm`` or ``RMSNorm``."""
    return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind](width, eps=eps)
