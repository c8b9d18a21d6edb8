"""Linear and embedding layers, split over the tensor axis.

Legend: N tokens, D input width, O output width, B batch, S sequence. Under sequence parallelism a rank holds only its
own tokens between layers: a column layer takes these and returns all tokens, a row layer takes all and returns these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.tensor_parallel.axis import ALONE, TensorAxis, scatter_sum_tokens, sum_over
from gptpar.tensor_parallel.cost import BatchShape, Cost, Product
from gptpar.tensor_parallel.linear_ops import column_forward, row_forward
from gptpar.tensor_parallel.products import PLAIN, product
from gptpar.topology.initial_values import Constant, Normal
from gptpar.topology.matrices import WHOLE, Matrices
from gptpar.topology.placement import ParameterSpec, Placement


def _features_per_rank(features: int, axis: TensorAxis) -> int:
    assert features % axis.size == 0, f"{features} features do not divide over {axis.size} tensor ranks"
    return features // axis.size


class SplitLinear(nn.Module):
    """``y = x W^T + b`` on one tensor rank: what column and row layers have in common.

    Args:
        shape: of this rank's weight: output features, in one or two dimensions, x input features.
        placement, bias_placement: placements of the weight and of the bias.
        bias: whether there is a bias.
        std: standard deviation of the initial weights.
        axis: this process's place on the tensor axis.
        bias_gradient: whether this layer forms the bias's gradient; if not, the function that reads the output does
            (:mod:`gptpar.kernels.bias_gradient`).
        format: number format of the products (:mod:`gptpar.tensor_parallel.products`).
        matrices: how the weight divides into matrices.

    Attributes:
        gradient_sum: [output features, input features] where the backward pass of the coming call adds the weight's
            gradient; ``None``: it returns the gradient to autograd.
        added: a scalar; autograd gives it a gradient when the addition to ``gradient_sum`` has been launched.
    """

    gradient_sum: torch.Tensor | None
    operator: Callable[..., torch.Tensor]
    """The product together with its transfer, and with the addition of the weight's gradient to its sum."""

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        bias_placement: Placement,
        *,
        bias: bool,
        std: float,
        axis: TensorAxis,
        bias_gradient: bool = True,
        format: str = PLAIN,
        matrices: Matrices = WHOLE,
    ):
        super().__init__()
        self.declared = {
            "weight": ParameterSpec(Normal(std), placement, matrices),
            "bias": ParameterSpec(Constant(0.0), bias_placement),
        }
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1])) if bias else None
        self.alone, self.token_splits, self.bias_gradient = axis.size == 1, axis.token_splits, bias_gradient
        self.format, self.transfer = format, (axis.group_name, axis.splits_tokens, axis.fused)
        # A buffer, so that offload of saved activations leaves it on the device.
        self.register_buffer("gradient_sum", None, persistent=False)
        self.added: torch.Tensor | None = None

    @property
    def unsummed_bias(self) -> nn.Parameter | None:
        """The bias, if the function that reads the output forms its gradient; else ``None``."""
        return None if self.bias_gradient else self.bias

    def forward(self, x: torch.Tensor, operator: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Tokens x input features -> tokens x output features.

        Args:
            operator: in place of the layer's own, one that also computes the input features from ``x``.
        """
        weight, bias = self._weight_and_bias()
        total = self.gradient_sum if torch.is_grad_enabled() else None
        if self.alone and operator is None and total is None:
            return product(x, weight.t(), self.format, bias=bias)
        weight = weight if total is None else weight.detach()
        how = *self.transfer, self.format, total, self.added
        y = (operator or self.operator)(x, weight, bias if self.alone else None, *how)
        return y if bias is None or self.alone else y + bias

    def _weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight_OI, and bias_O without a gradient if the function that reads the output forms it."""
        bias = self.bias if self.bias is None or self.bias_gradient else self.bias.detach()
        return self.weight.flatten(0, -2), None if bias is None else bias.flatten()


class ColumnParallelLinear(SplitLinear):
    """A linear layer that takes x_nD, this rank's tokens. Each tensor rank returns its output features of all tokens.

    Args:
        in_features: width of the input.
        out_features: width of the whole output.
        parts: number of equal parts of the output (2 for a gated MLP). With several, the weight is [parts, features,
            inputs], and its features are split, so that each rank has a share of every part.
        axis, **how: see :class:`SplitLinear`.
    """

    operator = column_forward

    def __init__(self, in_features: int, out_features: int, *, parts: int = 1, axis: TensorAxis = ALONE, **how: Any):
        length = out_features // parts
        own = _features_per_rank(length, axis)
        rows = (own,) if parts == 1 else (parts, own)
        split = axis.split(len(rows) - 1, length)
        super().__init__((*rows, in_features), split, split, axis=axis, **how)

    def cost(self, batch: BatchShape) -> Cost:
        """The product; its input is kept."""
        columns, inner = self.weight.flatten(0, -2).shape
        kept = inner * batch.dtype.itemsize / self.token_splits
        return Cost((Product(inner, columns, moves_input=not self.alone),), kept=kept)


class RowParallelLinear(SplitLinear):
    """A linear layer that takes all tokens and returns y_nO; each tensor rank holds some input features.

    Every rank holds the bias whole, and adds it after the sum over ranks.

    Args:
        in_features: width of the whole input.
        out_features: width of the output.
        axis, **how: see :class:`SplitLinear`.
    """

    operator = row_forward

    def __init__(self, in_features: int, out_features: int, *, axis: TensorAxis = ALONE, **how: Any):
        shape = (out_features, _features_per_rank(in_features, axis))
        super().__init__(shape, axis.split(1, in_features), axis.between_layers, axis=axis, **how)

    def cost(self, batch: BatchShape) -> Cost:
        """The product; its input is kept."""
        columns, inner = self.weight.shape
        return Cost((Product(inner, columns, moves_output=not self.alone),), kept=inner * batch.dtype.itemsize)


class VocabParallelEmbedding(nn.Module):
    """Token embedding; each tensor rank holds a range of the vocabulary; their lengths differ by at most one.

    Args:
        num_embeddings: length of the padded vocabulary.
        width: width of the model.
        std: standard deviation of the initial values.
        axis: this process's place on the tensor axis.

    Attributes:
        split: of the weight's rows, with this rank's range.
        on_output_grad: is called with the LM head's contribution to the weight's gradient, some rows at a time. The
            calls come before the backward pass, which adds the lookup's contribution; see
            :class:`~gptpar.tensor_parallel.cross_entropy.LinearCrossEntropy`.
    """

    on_output_grad: Callable[[torch.Tensor, slice], None] | None = None

    def __init__(
        self,
        num_embeddings: int,
        width: int,
        *,
        std: float,
        axis: TensorAxis = ALONE,
    ):
        super().__init__()
        assert num_embeddings >= axis.size, f"{num_embeddings} pieces for {axis.size} tensor ranks"
        self.start, stop = axis.range_of(num_embeddings)
        self.axis, self.num_embeddings, self.split = axis, num_embeddings, axis.split_of(0, num_embeddings)
        self.declared = {"weight": ParameterSpec(Normal(std), axis.split(0, num_embeddings))}
        self.weight = nn.Parameter(torch.empty(stop - self.start, width))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns x_ND: of all tokens, or under sequence parallelism of this rank's."""
        tokens_N = tokens_BS.flatten()
        if self.axis.size == 1:
            return F.embedding(tokens_N, self.weight)
        local_N = tokens_N - self.start
        elsewhere_N = (local_N < 0) | (local_N >= self.weight.shape[0])
        x_ND = F.embedding(local_N.masked_fill(elsewhere_N, 0), self.weight)
        x_ND = x_ND.masked_fill(elsewhere_N[:, None], 0)
        return (scatter_sum_tokens if self.axis.splits_tokens else sum_over)(x_ND, self.axis)

    def cost(self, batch: BatchShape) -> Cost:
        """A lookup is no product, and counts as nothing."""
        return Cost()
