"""Linear and embedding layers, with the dimension that tensor parallelism splits declared as data beside each.

Legend of shape suffixes: B batch, S sequence, D model width, O output width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.init import Constant, Init, Normal


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b``; the output features are what tensor parallelism splits.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is a bias.
        std: standard deviation of the initial weights.
        parts: the output is this many equal parts (2 for a gated MLP). The weight then has a leading dimension, so
            that a contiguous slice of its split dimension is a fair share of every part.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, parts: int = 1):
        super().__init__()
        shape = (out_features,) if parts == 1 else (parts, out_features // parts)
        self.shard_dims = {"weight": len(shape) - 1, "bias": len(shape) - 1}
        self.init: dict[str, Init] = {"weight": Normal(std), "bias": Constant(0.0)}
        self.weight = nn.Parameter(torch.empty(*shape, in_features))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Returns y_BSO."""
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x_BSD, self.weight.flatten(0, -2), bias)


class RowParallelLinear(nn.Module):
    """``y = x W^T + b``; the input features are what tensor parallelism splits."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float):
        super().__init__()
        self.init: dict[str, Init] = {"weight": Normal(std), "bias": Constant(0.0)}
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Returns y_BSO."""
        return F.linear(x_BSD, self.weight, self.bias)


class VocabParallelEmbedding(nn.Module):
    """Token embedding; the vocabulary is what tensor parallelism splits.

    Args:
        num_embeddings: the padded vocabulary.
        width: width of the model.
        std: standard deviation of the initial values.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, num_embeddings: int, width: int, *, std: float):
        super().__init__()
        self.init: dict[str, Init] = {"weight": Normal(std)}
        self.weight = nn.Parameter(torch.empty(num_embeddings, width))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns x_BSD."""
        return F.embedding(tokens_BS, self.weight)
