"""Makes a block's linear layers: decides their number format, their kernel, and who sums a bias's gradient.

The gradient of a linear layer's bias is the sum of its output's gradient over all tokens. Some functions that read the
output form that sum together with the output's gradient (:mod:`gptpar.kernels.bias_gradient`), which saves a pass over
memory. Whether they do is decided in this file alone: a reader asks for the layer's ``unsummed_bias``, which is
``None`` if the layer itself sums the bias's gradient.

The LM head is no layer of a block: its products are in :mod:`gptpar.tensor_parallel.cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gptpar.config import ModelConfig
from gptpar.kernels.bias_gradient import SUMMING
from gptpar.model.mup import hidden_std
from gptpar.tensor_parallel import ALONE, ColumnParallelLinear, RowParallelLinear, TensorAxis
from gptpar.tensor_parallel.products import PLAIN
from gptpar.topology.matrices import WHOLE, Matrices


class Reader(Enum):
    """The reader of a linear layer's output."""

    HEADS = "split into queries, keys and values"
    NORMED_HEADS = "likewise, and normalised by a kernel"
    ACTIVATION = "the MLP's activation function"
    STREAM = "a norm, directly or after the sum with the residual stream"
    END = "a norm, or the residual stream at the block's end"


@dataclass(frozen=True)
class Linears:
    """Makes the linear layers of one block on one tensor rank.

    Args:
        axis: this process's place on the tensor axis.
        residual_norm: whether what these layers add to the residual stream goes straight into the sum of a
            :class:`~gptpar.model.norm.ResidualLayerNorm`.
        output_norm: whether it goes straight into a :class:`~gptpar.model.norm.OutputLayerNorm` instead.
        activation_again: whether the MLP's activation is computed again in the backward pass. Its bias then has a
            gradient of its own: in a compiled block, torch 2.11 keeps the output of a function with its own backward.
    """

    config: ModelConfig
    axis: TensorAxis = ALONE
    residual_norm: bool = False
    output_norm: bool = False
    activation_again: bool = False

    def column(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        reader: Reader,
        parts: int = 1,
        matrices: Matrices = WHOLE,
    ) -> ColumnParallelLinear:
        """A layer whose output features are split over the tensor axis."""
        std, how = hidden_std(self.config), self._how(reader) | {"matrices": matrices}
        return ColumnParallelLinear(in_features, out_features, bias=bias, std=std, parts=parts, **how)

    def row(self, in_features: int, out_features: int, *, bias: bool, reader: Reader) -> RowParallelLinear:
        """A layer that writes to the residual stream, whose input features are split over the tensor axis.

        The standard deviation of its initial weights is std / sqrt(2 x layers), as in GPT-2 and Megatron.
        """
        assert self.config.num_layers
        std = hidden_std(self.config) / (2 * self.config.num_layers) ** 0.5
        return RowParallelLinear(in_features, out_features, bias=bias, std=std, **self._how(reader))

    def _how(self, reader: Reader) -> dict[str, Any]:
        return {"axis": self.axis, "bias_gradient": not self._is_summed_by(reader), "format": PLAIN}

    def _is_summed_by(self, reader: Reader) -> bool:
        config = self.config
        match reader:
            case Reader.NORMED_HEADS:
                return True
            case Reader.HEADS:  # norms, positions and gates merge the heads' gradients in kernels of their own
                positions = config.position_embedding_type in ("rope", "alibi")
                return not (config.qk_layernorm or positions or config.attention_output_gate)
            case Reader.ACTIVATION:
                return not (config.gated or self.activation_again) and config.mlp_activation in SUMMING
            case Reader.STREAM:  # dropout in between would leave the bias only a part of the stream's gradient
                return self.output_norm or (self.residual_norm and config.hidden_dropout == 0)
            case Reader.END:
                return self.output_norm
