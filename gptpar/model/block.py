"""One transformer block.

Legend: B batch, S sequence, D model width, F width of the MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.config import ModelConfig
from gptpar.model.attention import Attention
from gptpar.model.norm import make_norm
from gptpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form) between them, or the gated SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, output_std: float):
        super().__init__()
        assert config.hidden_size and config.ffn_hidden_size
        self.gated = config.swiglu
        parts = 2 if self.gated else 1
        self.up = ColumnParallelLinear(
            config.hidden_size,
            parts * config.ffn_hidden_size,
            bias=config.add_bias_linear,
            std=config.init_method_std,
            parts=parts,
        )
        self.down = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear, std=output_std
        )

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Returns y_BSD."""
        up = self.up(x_BSD)
        if self.gated:
            gate_BSF, value_BSF = up.chunk(2, dim=-1)
            return self.down(F.silu(gate_BSF) * value_BSF)
        return self.down(F.gelu(up, approximate="tanh"))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))`` (pre-norm, as GPT-2).

    Weights that write to the residual stream start with std / sqrt(2 x layers) (Megatron's and GPT-2's scale).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.num_layers and config.hidden_size
        output_std = config.init_method_std / (2 * config.num_layers) ** 0.5
        self.attention_norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, output_std)
        self.mlp_norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config, output_std)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x_BSD: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns y_BSD."""
        attended_BSD = self.attention(self.attention_norm(x_BSD), positions_BS, document_ids_BS)
        x_BSD = x_BSD + self.dropout(attended_BSD)
        return x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
