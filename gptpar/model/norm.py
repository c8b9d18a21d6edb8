"""Normalisation layers.

Their parameters are whole on every tensor-parallel rank; whoever builds one says how its gradient is placed, which
depends on what it normalises (:class:`~gptpar.tensor_parallel.axis.TensorAxis`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.kernels.residual_norm import residual_norm
from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import REPLICATED, Gradient, ParameterSpec


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016) over the last dimension, with weight and bias."""

    def __init__(self, width: int, *, eps: float, gradient: Gradient):
        super().__init__()
        self.declared = {
            "weight": ParameterSpec(Constant(1.0), REPLICATED, gradient),
            "bias": ParameterSpec(Constant(0.0), REPLICATED, gradient),
        }
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class ResidualLayerNorm(LayerNorm):
    """The same of the residual stream, which goes on beside it (:mod:`gptpar.kernels.residual_norm`)."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, added: torch.Tensor | None = None, added_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``x + added`` and its normalised values; a bias contained in ``added`` gets its gradient here."""
        return residual_norm(x, added, added_bias, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) over the last dimension, with weight."""

    def __init__(self, width: int, *, eps: float, gradient: Gradient):
        super().__init__()
        self.declared = {"weight": ParameterSpec(Constant(1.0), REPLICATED, gradient)}
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.rms_norm(x, cast(list[int], self.weight.shape), self.weight, self.eps)


NORMS: dict[str, type[nn.Module]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
"""By the names of ``--normalization``."""


def make_norm(kind: str, width: int, eps: float, gradient: Gradient, *, residual: bool = False) -> nn.Module:
    """A norm by its name in ``NORMS``; with ``residual``, LayerNorm is a :class:`ResidualLayerNorm`."""
    if residual and kind == "LayerNorm":
        return ResidualLayerNorm(width, eps=eps, gradient=gradient)
    return NORMS[kind](width, eps=eps, gradient=gradient)
