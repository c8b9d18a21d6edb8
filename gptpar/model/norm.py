"""Normalisation layers: LayerNorm, RMSNorm, and the norm over all heads.

Every tensor rank holds their parameters whole, except those of the norm over all heads. The builder of a norm says how
its gradient is placed, which depends on what it normalises (:class:`~gptpar.tensor_parallel.axis.TensorAxis`).

Legend: B batch, S sequence, H query heads and G key heads of this rank, K head width.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.kernels.residual_norm import residual_norm
from gptpar.tensor_parallel import TensorAxis
from gptpar.tensor_parallel.linear_ops import sum_over_ranks
from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import REPLICATED, SAME, Gradient, ParameterSpec


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
    """LayerNorm of the residual stream, fused with the sum before it (:mod:`gptpar.kernels.residual_norm`)."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, added: torch.Tensor | None = None, added_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (``x + added``, the sum normalised).

        Args:
            added: what is added to the residual stream; ``None``: nothing.
            added_bias: the bias that ``added`` contains, if its gradient is formed here.
        """
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


class WidthRMSNorm(nn.Module):
    """RMSNorm over the channels of all heads together (OLMo et al. 2024); each tensor rank has its own heads.

    The caller adds up the ranks' sums of squares (:func:`norm_over_width`).
    """

    def __init__(self, width: int, *, eps: float, axis: TensorAxis):
        super().__init__()
        self.declared = {"weight": ParameterSpec(Constant(1.0), axis.split(0, width), SAME)}
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width // axis.size))

    def squares(self, x_BHSK: torch.Tensor) -> torch.Tensor:
        """squares_BS: the sum of squares over this rank's channels, in at least 32 bits."""
        return x_BHSK.to(torch.promote_types(x_BHSK.dtype, torch.float32)).square().sum((1, 3))

    def forward(self, x_BHSK: torch.Tensor, squares_BS: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``.

        Args:
            squares_BS: the sum over the channels of all ranks.
        """
        scale_BS = (squares_BS / self.width + self.eps).rsqrt()
        weight_H1K = self.weight.view(x_BHSK.shape[1], 1, -1)
        return (x_BHSK * scale_BS[:, None, :, None] * weight_H1K).to(x_BHSK.dtype)


def norm_over_width(
    query_norm: WidthRMSNorm, key_norm: WidthRMSNorm, q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, axis: TensorAxis
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, keys), normalised; one transfer over the tensor axis sums the squares of both."""
    squares_2BS = torch.stack([query_norm.squares(q_BHSK), key_norm.squares(k_BGSK)])
    if axis.size > 1:
        squares_2BS = sum_over_ranks(squares_2BS, axis.group_name)
    of_queries_BS, of_keys_BS = squares_2BS.unbind()
    return query_norm(q_BHSK, of_queries_BS), key_norm(k_BGSK, of_keys_BS)


NORMS: dict[str, type[nn.Module]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
"""By the names of ``--normalization``."""


def make_norm(kind: str, width: int, eps: float, gradient: Gradient, *, residual: bool = False) -> nn.Module:
    """A norm by its name in ``NORMS``; with ``residual``, LayerNorm becomes a :class:`ResidualLayerNorm`.

    Args:
        gradient: what autograd leaves of its parameters' gradients on each tensor rank.
    """
    if residual and kind == "LayerNorm":
        return ResidualLayerNorm(width, eps=eps, gradient=gradient)
    return NORMS[kind](width, eps=eps, gradient=gradient)
