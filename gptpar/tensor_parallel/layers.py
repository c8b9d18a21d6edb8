"""Linear and embedding layers, split over the tensor axis.

Legend: N tokens, D input width, O output width, B batch, S sequence. Under sequence parallelism a rank holds only its
own tokens between layers: a column layer takes these and returns all tokens, a row layer takes all and returns these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.tensor_parallel.axis import ALONE, TensorAxis
from gptpar.tensor_parallel.collectives import scatter_sum_tokens, sum_over
from gptpar.tensor_parallel.cost import BatchShape, Cost, Product
from gptpar.tensor_parallel.linear_ops import column_forward, row_forward
from gptpar.topology.initial_values import Constant, Normal
from gptpar.topology.matrices import WHOLE, Matrices
from gptpar.topology.placement import ParameterSpec


def _features_per_rank(features: int, axis: TensorAxis) -> int:
    assert features % axis.size == 0, f"{features} features do not divide over {axis.size} tensor ranks"
    return features // axis.size


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b``; each tensor rank holds some of the output features.

    Args:
        in_features: width of the input.
        out_features: width of the whole output.
        bias: whether there is a bias.
        std: standard deviation of the initial weights.
        parts: the output consists of this many equal parts (2 for a gated MLP). If there are several, the weight has
            one more dimension in front, so that a slice of its split dimension has equally much of every part.
        axis: this process's place on the tensor axis.
        bias_gradient: whether this layer forms the bias's gradient; if not, the function that reads the output does
            (:mod:`gptpar.kernels.bias_gradient`).
        matrices: how the weight divides into matrices.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        parts: int = 1,
        axis: TensorAxis = ALONE,
        bias_gradient: bool = True,
        matrices: Matrices = WHOLE,
    ):
        super().__init__()
        length = out_features // parts
        own = _features_per_rank(length, axis)
        shape = (own,) if parts == 1 else (parts, own)
        split = axis.split(len(shape) - 1, length)
        self.declared = {
            "weight": ParameterSpec(Normal(std), split, matrices),
            "bias": ParameterSpec(Constant(0.0), split),
        }
        self.weight = nn.Parameter(torch.empty(*shape, in_features))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None
        self.alone, self.group_name, self.token_splits = axis.size == 1, axis.group_name, axis.token_splits
        self.sequence_parallel, self.fused = axis.sequence_parallel, axis.fused
        self.bias_gradient = bias_gradient

    @property
    def unsummed_bias(self) -> nn.Parameter | None:
        """The bias, if the function that reads the output forms its gradient; else ``None``."""
        return None if self.bias_gradient else self.bias

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns y_NO: this rank's features of all tokens."""
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        if bias is not None and not self.bias_gradient:
            bias = bias.detach()
        if self.alone:
            return F.linear(x_ND, weight, bias)
        y_NO = column_forward(x_ND, weight, self.group_name, self.sequence_parallel, self.fused)
        return y_NO if bias is None else y_NO + bias

    def cost(self, batch: BatchShape) -> Cost:
        """The product; its input is kept."""
        columns, inner = self.weight.flatten(0, -2).shape
        kept = inner * batch.dtype.itemsize / self.token_splits
        return Cost((Product(inner, columns, moves_input=not self.alone),), kept=kept)


class RowParallelLinear(nn.Module):
    """``y = x W^T + b``; each tensor rank holds some of the input features.

    Args:
        in_features: width of the whole input.
        out_features: width of the output.
        bias: whether there is a bias; every rank holds it whole and adds it after the sum over ranks.
        std: standard deviation of the initial weights.
        axis: this process's place on the tensor axis.
        bias_gradient: as in :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        axis: TensorAxis = ALONE,
        bias_gradient: bool = True,
    ):
        super().__init__()
        self.declared = {
            "weight": ParameterSpec(Normal(std), axis.split(1, in_features)),
            "bias": ParameterSpec(Constant(0.0), axis.between_layers),
        }
        self.weight = nn.Parameter(torch.empty(out_features, _features_per_rank(in_features, axis)))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.alone, self.group_name = axis.size == 1, axis.group_name
        self.sequence_parallel, self.fused = axis.sequence_parallel, axis.fused
        self.bias_gradient = bias_gradient

    @property
    def unsummed_bias(self) -> nn.Parameter | None:
        """As in :class:`ColumnParallelLinear`."""
        return None if self.bias_gradient else self.bias

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns y_NO: the sum over ranks."""
        bias = self.bias if self.bias is None or self.bias_gradient else self.bias.detach()
        if self.alone:
            return F.linear(x_ND, self.weight, bias)
        y_NO = row_forward(x_ND, self.weight, self.group_name, self.sequence_parallel, self.fused)
        return y_NO if bias is None else y_NO + bias

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
        on_output_grad: is called with the part of the weight's gradient that the LM head contributes, some rows at a
            time. That is before the backward pass, which adds the contribution of the lookup; see
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
        self.axis, self.num_embeddings = axis, num_embeddings
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
