"""Causal self-attention: projections, grouped queries, rotary positions, query and key norms, output gate.

Legend: B batch, S sequence, N = B x S tokens, D model width, G key/value heads ("groups"), Q query heads of one group,
K head width.
With tensor parallelism G counts this rank's groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.config import ModelConfig
from gptpar.kernels.bias_gradient import heads_and_gate, split_heads
from gptpar.model.core_attention import AttentionDropout, core_attention
from gptpar.model.dropout import NO_SEEDS, LayerSeeds
from gptpar.model.flops import qkv_width, query_width
from gptpar.model.linear import Linears, Reader, rotated_width
from gptpar.model.mup import attention_scale
from gptpar.model.norm import WidthRMSNorm, make_norm, norm_over_width
from gptpar.tensor_parallel import TensorAxis


def rotate(x_BHSK: torch.Tensor, positions_BS: torch.Tensor | None, rotated: int, base: int) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) on the first channels of each head; returns the shape of ``x``.

    Channels i and i + rotated/2 form a pair (GPT-NeoX's and Megatron's convention), turned by the angle
    ``position * base ** (-2i / rotated)``; angles are computed in fp32.

    Args:
        positions_BS: of each token; ``None``: 0, 1, 2, ...
        rotated: how many channels are turned, an even number; the others stay as they are.
        base: of the angles' frequencies.
    """
    device, length = x_BHSK.device, x_BHSK.shape[2]
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    positions = torch.arange(length, device=device)[None] if positions_BS is None else positions_BS
    angles_B1SR = (positions[:, :, None].float() * base**-exponents)[:, None]
    cos, sin = angles_B1SR.cos().to(x_BHSK.dtype), angles_B1SR.sin().to(x_BHSK.dtype)
    first, second, rest = x_BHSK.split([rotated // 2, rotated // 2, x_BHSK.shape[-1] - rotated], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


Attend = Callable[..., torch.Tensor]
"""A function that takes the arguments of :func:`core_attention` by position, and returns the same."""


class Attention(nn.Module):
    """Fused QKV projection, scaled dot-product attention, output projection.

    A model may normalise queries and keys in two ways. Head by head (Dehghani et al. 2023), all heads have one norm of
    a head's width; each tensor rank holds it whole and applies it to its own heads. Over the channels of all heads
    together (OLMo et al. 2024), each tensor rank holds the part of the norm's weight that belongs to its heads.

    Rows of the QKV weight are ordered by group: the group's query heads, its key head, its value head (Megatron's
    order), then the gates of its query heads if the model has gates. So a contiguous slice is a set of whole groups. A
    gate multiplies the attention's output, channel by channel, by its sigmoid (Qiu et al. 2025).

    Args:
        linears: makes the projections.
        window: how many tokens a token sees, itself among them; ``None``: all earlier ones.
        recompute_core: whether everything but the projections is computed again in the backward pass.

    Attributes:
        attend: :func:`core_attention`; while text is generated, a cache of keys and values instead.
    """

    def __init__(self, linears: Linears, *, window: int | None = None, recompute_core: bool = False):
        super().__init__()
        config, axis = linears.config, linears.axis
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        self.rotated, self.rotary_base = rotated_width(config), config.rotary_base
        self.dropout = config.attention_dropout
        self.num_groups = config.num_query_groups
        self.first_group = axis.rank * (config.num_query_groups // axis.size)
        self.window, self.gated, self.recompute_core = window, config.attention_output_gate, recompute_core
        self.axis, self.scale = axis, attention_scale(config)
        self.attend: Attend = core_attention
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = linears.column(config.hidden_size, qkv_width(config), bias=qkv_bias, reader=Reader.HEADS)
        self.query_norm, self.key_norm = _norms(config, axis)
        heads, bias = query_width(config), config.add_bias_linear
        self.out = linears.row(heads, config.hidden_size, bias=bias, reader=Reader.STREAM)

    def forward(
        self,
        x_ND: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
    ) -> torch.Tensor:
        """Returns y_ND; for the arguments see :meth:`gptpar.model.block.Block.forward`."""
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
        shape, gate_BHSK = (seq_length, self.queries_per_group, self.head_width), None
        if self.gated:
            q_BHSK, k_BGSK, v_BGSK, gate_BHSK = heads_and_gate(qkv, *shape)
        else:
            q_BHSK, k_BGSK, v_BGSK = split_heads(qkv, self.qkv.unsummed_bias, *shape)
        q_BHSK, k_BGSK = self._normed(q_BHSK, k_BGSK)
        if self.rotated:
            q_BHSK = rotate(q_BHSK, positions_BS, self.rotated, self.rotary_base)
            k_BGSK = rotate(k_BGSK, positions_BS, self.rotated, self.rotary_base)
        dropout = None
        if self.dropout and self.training:
            assert seeds is not None, NO_SEEDS
            dropout = AttentionDropout(self.dropout, seeds, self.first_group, self.num_groups)
        y_BHSK = self.attend(q_BHSK, k_BGSK, v_BGSK, document_ids_BS, dropout, self.window, self.scale)
        if gate_BHSK is not None:
            y_BHSK = y_BHSK * gate_BHSK.sigmoid()
        return rearrange(y_BHSK, "b h s k -> (b s) (h k)")

    def _normed(self, q_BHSK: torch.Tensor, k_BGSK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normalised if the model normalises them."""
        query_norm, key_norm = self.query_norm, self.key_norm
        if query_norm is None or key_norm is None:
            return q_BHSK, k_BGSK
        if isinstance(query_norm, WidthRMSNorm) and isinstance(key_norm, WidthRMSNorm):
            return norm_over_width(query_norm, key_norm, q_BHSK, k_BGSK, self.axis)
        # Queries that lie token by token in memory make attention write its output so, too: the output projection then
        # reads it without a copy.
        q_BHSK = query_norm(q_BHSK.transpose(1, 2)).transpose(1, 2)
        return q_BHSK, key_norm(k_BGSK.transpose(1, 2)).transpose(1, 2)


def _norms(config: ModelConfig, axis: TensorAxis) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of queries and of keys; ``None`` if the model has none."""
    if not config.qk_layernorm:
        return None, None
    kind, width, eps = config.normalization, config.kv_channels, config.norm_epsilon
    if config.qk_layernorm_scope == "width":
        return (
            WidthRMSNorm(config.num_attention_heads * width, eps=eps, axis=axis),
            WidthRMSNorm(config.num_query_groups * width, eps=eps, axis=axis),
        )
    norm = partial(make_norm, kind, width, eps, axis.gradient_inside_layers)
    return norm(), norm()
