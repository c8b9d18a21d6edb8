"""Causal self-attention with grouped queries and rotary positions.

Legend: B batch, S sequence, D model width, G key/value heads ("groups"), Q query heads of one group, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from gptpar.config import ModelConfig
from gptpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def rotate(x_BHSK: torch.Tensor, positions_BS: torch.Tensor | None, rotated: int, base: int) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) on the first ``rotated`` channels of each head.

    Channels i and i + rotated/2 form a pair (GPT-NeoX's and Megatron's convention), turned by the angle
    ``position * base ** (-2i / rotated)``; angles are computed in fp32.
    """
    device, length = x_BHSK.device, x_BHSK.shape[2]
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    positions = torch.arange(length, device=device)[None] if positions_BS is None else positions_BS
    angles_B1SR = (positions[:, :, None].float() * base**-exponents)[:, None]
    cos, sin = angles_B1SR.cos().to(x_BHSK.dtype), angles_B1SR.sin().to(x_BHSK.dtype)
    first, second, rest = x_BHSK.split([rotated // 2, rotated // 2, x_BHSK.shape[-1] - rotated], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def document_mask(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Boolean mask_B1SS: a token sees itself and earlier tokens of its own document."""
    length = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=document_ids_BS.device).tril()
    return (same_BSS & causal_SS)[:, None]


class Attention(nn.Module):
    """Fused QKV projection, scaled dot-product attention, output projection.

    Rows of the QKV weight are ordered by group: the group's query heads, its key head, its value head (Megatron's
    order), so that a contiguous slice is a set of whole groups.
    """

    def __init__(self, config: ModelConfig, output_std: float):
        super().__init__()
        assert config.num_attention_heads and config.num_query_groups and config.hidden_size and config.kv_channels
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        self.rotated = (
            int(config.kv_channels * config.rotary_percent) if config.position_embedding_type == "rope" else 0
        )
        self.rotary_base = config.rotary_base
        self.dropout = config.attention_dropout
        query_width = config.num_attention_heads * config.kv_channels
        qkv_width = query_width + 2 * config.num_query_groups * config.kv_channels
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = ColumnParallelLinear(config.hidden_size, qkv_width, bias=qkv_bias, std=config.init_method_std)
        self.out = RowParallelLinear(query_width, config.hidden_size, bias=config.add_bias_linear, std=output_std)

    def forward(
        self, x_BSD: torch.Tensor, positions_BS: torch.Tensor | None, document_ids_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns y_BSD."""
        qkv = rearrange(self.qkv(x_BSD), "b s (g h k) -> b g h s k", h=self.queries_per_group + 2, k=self.head_width)
        q, k, v = qkv.split([self.queries_per_group, 1, 1], dim=2)
        q_BHSK, k_BGSK, v_BGSK = q.flatten(1, 2), k.squeeze(2), v.squeeze(2)
        if self.rotated:
            q_BHSK = rotate(q_BHSK, positions_BS, self.rotated, self.rotary_base)
            k_BGSK = rotate(k_BGSK, positions_BS, self.rotated, self.rotary_base)
        y_BHSK = F.scaled_dot_product_attention(
            q_BHSK,
            k_BGSK,
            v_BGSK,
            attn_mask=None if document_ids_BS is None else document_mask(document_ids_BS),
            is_causal=document_ids_BS is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.queries_per_group > 1,
        )
        return self.out(rearrange(y_BHSK, "b h s k -> b s (h k)"))
