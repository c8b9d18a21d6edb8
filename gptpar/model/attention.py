"""Causal self-attention with grouped queries and rotary positions.

Legend: B batch, S sequence, N = B x S tokens, D model width, G key/value heads ("groups"), Q query heads of one group,
K head width.
With tensor parallelism G counts this rank's groups.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.kernels.bias_gradient import split_heads
from gptpar.model.core_attention import AttentionDropout, core_attention
from gptpar.model.dropout import NO_SEEDS, LayerSeeds
from gptpar.model.linear import Linears, Reader, rotated_width
from gptpar.model.norm import make_norm


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


class Attention(nn.Module):
    """Fused QKV projection, scaled dot-product attention, output projection.

    A model may normalise each head's queries and keys (Dehghani et al. 2023); all heads share one norm of a head's
    width. Each tensor rank has that norm whole and applies it to its own heads.

    Rows of the QKV weight are ordered by group: the group's query heads, its key head, its value head (Megatron's
    order), so that a contiguous slice is a set of whole groups.

    Args:
        linears: makes the projections.
        recompute_core: whether everything but the projections is computed again in the backward pass.
    """

    def __init__(self, linears: Linears, *, recompute_core: bool = False):
        super().__init__()
        config, axis = linears.config, linears.axis
        assert config.num_attention_heads and config.num_query_groups and config.hidden_size and config.kv_channels
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        self.rotated, self.rotary_base = rotated_width(config), config.rotary_base
        self.dropout = config.attention_dropout
        self.num_groups = config.num_query_groups
        self.first_group = axis.rank * (config.num_query_groups // axis.size)
        self.recompute_core = recompute_core
        query_width = config.num_attention_heads * config.kv_channels
        qkv_width = query_width + 2 * config.num_query_groups * config.kv_channels
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = linears.column(config.hidden_size, qkv_width, bias=qkv_bias, reader=Reader.HEADS)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_layernorm:
            kind, eps = config.normalization, config.norm_epsilon
            norm = partial(make_norm, kind, config.kv_channels, eps, axis.gradient_inside_layers)
            self.query_norm, self.key_norm = norm(), norm()
        self.out = linears.row(query_width, config.hidden_size, bias=config.add_bias_linear, reader=Reader.STREAM)

    def forward(
        self,
        x_ND: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
    ) -> torch.Tensor:
        """Returns y_ND; with dropout, training needs the layer's seeds."""
        core = (
            partial(checkpoint, self.core, use_reentrant=False, preserve_rng_state=False)
            if self.recompute_core and self.training
            else self.core
        )
        return self.out(core(self.qkv(x_ND), positions_BS, document_ids_BS, seq_length, seeds))

    def core(
        self,
        qkv: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
    ) -> torch.Tensor:
        """Attention without its projections: from all tokens' queries, keys and values to y_N(HK)."""
        shape = seq_length, self.queries_per_group, self.head_width
        q_BHSK, k_BGSK, v_BGSK = split_heads(qkv, self.qkv.unsummed_bias, *shape)
        if self.query_norm is not None and self.key_norm is not None:
            # Token by token in memory, as attention then leaves its output: the projection reads it without a copy.
            q_BHSK = self.query_norm(q_BHSK.transpose(1, 2)).transpose(1, 2)
            k_BGSK = self.key_norm(k_BGSK.transpose(1, 2)).transpose(1, 2)
        if self.rotated:
            q_BHSK = rotate(q_BHSK, positions_BS, self.rotated, self.rotary_base)
            k_BGSK = rotate(k_BGSK, positions_BS, self.rotated, self.rotary_base)
        dropout = None
        if self.dropout and self.training:
            assert seeds is not None, NO_SEEDS
            dropout = AttentionDropout(self.dropout, seeds, self.first_group, self.num_groups)
        y_BHSK = core_attention(q_BHSK, k_BGSK, v_BGSK, document_ids_BS, dropout)
        return rearrange(y_BHSK, "b h s k -> (b s) (h k)")
