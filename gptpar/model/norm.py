"""Normalisation layers: LayerNorm, RMSNorm, and the norm over all heads.

Every tensor rank holds their parameters whole, except those of the norm over all heads. The builder of a norm says
their placement, which depends on what it normalises (:class:`~gptpar.tensor_parallel.axis.TensorAxis`).

With ``--apply-layernorm-1p`` the parameter ``weight`` is the factor less one. It begins at 0, where 16-bit numbers are
dense, and weight decay pulls the factor towards 1.

Legend: B batch, S sequence, H query heads and G key heads of this rank, K head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.config import ModelConfig
from gptpar.kernels.head_norm import HeadNorm
from gptpar.kernels.residual_norm import output_norm, residual_norm
from gptpar.tensor_parallel import TensorAxis
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.tensor_parallel.linear_ops import sum_over_ranks
from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import ParameterSpec, Placement


class Norm(nn.Module):
    """The weight of a norm.

    Args:
        length: elements of the weight on this rank.
        placement: the weight's placement.
        eps: added to the variance.
        from_one: whether the parameter is the factor less one.

    Attributes:
        num_statistics: numbers that the norm keeps of each vector for its backward pass, beside its input.
    """

    num_statistics = 1

    def __init__(self, length: int, placement: Placement, *, eps: float, from_one: bool):
        super().__init__()
        self.declared = {"weight": ParameterSpec(Constant(0.0 if from_one else 1.0), placement)}
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(length))

    @property
    def factor(self) -> torch.Tensor:
        """What the normalised input is multiplied by: ``weight``, or ``1 + weight`` with ``from_one``."""
        return self.weight + 1 if self.from_one else self.weight

    @property
    def of_head(self) -> HeadNorm | None:
        """The parameters as :func:`gptpar.kernels.head_norm.normed_heads` takes them, if it has such a kernel."""
        return None

    def cost(self, batch: BatchShape) -> Cost:
        """The cost of what it keeps of a vector; a layer that has the norm counts the elements that it moves."""
        kept = self.weight.numel() * batch.dtype.itemsize + self.num_statistics * batch.statistic_size
        return Cost(kept=kept)


class LayerNorm(Norm):
    """Layer normalisation (Ba et al. 2016) over the last dimension, with weight and bias."""

    num_statistics = 2

    def __init__(self, width: int, *, eps: float, placement: Placement, from_one: bool = False):
        super().__init__(width, placement, eps=eps, from_one=from_one)
        self.declared["bias"] = ParameterSpec(Constant(0.0), placement)
        self.bias = nn.Parameter(torch.empty(width))

    @property
    def of_head(self) -> HeadNorm:
        """See :class:`Norm`."""
        return HeadNorm(self.factor, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.layer_norm(x, self.weight.shape, self.factor, self.bias, self.eps)


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
        return residual_norm(x, added, added_bias, self.factor, self.bias, self.eps)


class OutputLayerNorm(LayerNorm):
    """LayerNorm of what a layer returns, with a fused backward pass (:mod:`gptpar.kernels.residual_norm`)."""

    def forward(self, x: torch.Tensor, layer_bias: torch.Tensor | None = None) -> torch.Tensor:
        """Same shape as ``x``.

        Args:
            layer_bias: the bias that ``x`` contains, if its gradient is formed here.
        """
        return output_norm(x, layer_bias, self.factor, self.bias, self.eps)


class RMSNorm(Norm):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) over the last dimension, with weight."""

    def __init__(self, width: int, *, eps: float, placement: Placement, from_one: bool = False):
        super().__init__(width, placement, eps=eps, from_one=from_one)

    @property
    def of_head(self) -> HeadNorm:
        """See :class:`Norm`."""
        return HeadNorm(self.factor, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``."""
        return F.rms_norm(x, cast(list[int], self.weight.shape), self.factor, self.eps)


class WidthRMSNorm(Norm):
    """RMSNorm over the channels of all heads together (OLMo et al. 2024); each tensor rank has its own heads.

    The caller adds up the ranks' sums of squares (:func:`norm_over_width`).
    """

    def __init__(self, width: int, *, eps: float, axis: TensorAxis, from_one: bool = False):
        super().__init__(width // axis.size, axis.split(0, width), eps=eps, from_one=from_one)
        self.width = width

    def squares(self, x_BHSK: torch.Tensor) -> torch.Tensor:
        """squares_BS: the sum of squares over this rank's channels, in at least 32 bits."""
        return x_BHSK.to(torch.promote_types(x_BHSK.dtype, torch.float32)).square().sum((1, 3))

    def forward(self, x_BHSK: torch.Tensor, squares_BS: torch.Tensor) -> torch.Tensor:
        """Same shape as ``x``.

        Args:
            squares_BS: the sum over the channels of all ranks.
        """
        scale_BS = (squares_BS / self.width + self.eps).rsqrt()
        factor_H1K = self.factor.view(x_BHSK.shape[1], 1, -1)
        return (x_BHSK * scale_BS[:, None, :, None] * factor_H1K).to(x_BHSK.dtype)


def norm_over_width(
    query_norm: WidthRMSNorm, key_norm: WidthRMSNorm, q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, axis: TensorAxis
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, keys), normalised; one transfer over the tensor axis sums the squares of both."""
    squares_2BS = torch.stack([query_norm.squares(q_BHSK), key_norm.squares(k_BGSK)])
    if axis.size > 1:
        squares_2BS = sum_over_ranks(squares_2BS, axis.group_name)
    of_queries_BS, of_keys_BS = squares_2BS.unbind()
    return query_norm(q_BHSK, of_queries_BS), key_norm(k_BGSK, of_keys_BS)


NORMS: dict[str, type[Norm]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
"""Value of ``--normalization`` -> class."""


def norm_arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments that all norms of a model have in common."""
    return {"eps": config.norm_epsilon, "from_one": config.apply_layernorm_1p}


def make_norm(config: ModelConfig, width: int, placement: Placement, *, fused: type[LayerNorm] | None = None) -> Norm:
    """The norm of a model.

    Args:
        width: width of the vectors that it normalises.
        placement: its parameters' placement.
        fused: takes LayerNorm's place; ``None``: nothing does.
    """
    kind = NORMS[config.normalization]
    if fused and kind is LayerNorm:
        kind = fused
    return kind(width, placement=placement, **norm_arguments(config))
