"""Causal self-attention with grouped queries and rotary positions.

Legend: B batch, S sequence, N = B x S tokens, D model width, G key/value heads ("groups"), Q query heads of one group,
K head width.
With tensor parallelism G counts this rank's groups.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.config import ModelConfig
from gptpar.kernels.bias_gradient import heads, split_heads
from gptpar.model.attention_dropout import attention_with_dropout
from gptpar.model.dropout import NO_SEEDS, LayerSeeds
from gptpar.model.norm import make_norm
from gptpar.tensor_parallel import ALONE, ColumnParallelLinear, RowParallelLinear, TensorAxis


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

    A model may normalise each head's queries and keys (Dehghani et al. 2023); all heads share one norm of a head's
    width. Each tensor rank has that norm whole and applies it to its own heads.

    Rows of the QKV weight are ordered by group: the group's query heads, its key head, its value head (Megatron's
    order), so that a contiguous slice is a set of whole groups.

    Args:
        output_std: standard deviation of the output projection's initial weights.
        axis: this process's place on the tensor axis.
        recompute_core: whether everything but the projections is computed again in the backward pass.
        bias_gradient: of the output projection, see :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        config: ModelConfig,
        output_std: float,
        axis: TensorAxis = ALONE,
        *,
        recompute_core: bool = False,
        bias_gradient: bool = True,
    ):
        super().__init__()
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        self.rotated = (
            int(config.kv_channels * config.rotary_percent) if config.position_embedding_type == "rope" else 0
        )
        self.rotary_base = config.rotary_base
        self.dropout = config.attention_dropout
        self.num_groups = config.num_query_groups
        self.first_group = axis.rank * (config.num_query_groups // axis.size)
        self.recompute_core = recompute_core
        query_width = config.num_attention_heads * config.kv_channels
        qkv_width = query_width + 2 * config.num_query_groups * config.kv_channels
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            qkv_width,
            bias=qkv_bias,
            std=config.init_method_std,
            axis=axis,
            # Normalised or turned, gradients are put together by what takes them back to the projection.
            bias_gradient=self.rotated > 0 or config.qk_layernorm,
        )
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_layernorm:
            kind, eps = config.normalization, config.norm_epsilon
            norm = partial(make_norm, kind, config.kv_channels, eps, axis.gradient_inside_layers)
            self.query_norm, self.key_norm = norm(), norm()
        self.out = RowParallelLinear(
            query_width,
            config.hidden_size,
            bias=config.add_bias_linear,
            std=output_std,
            axis=axis,
            bias_gradient=bias_gradient,
        )

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
        if self.qkv.bias is None or self.qkv.bias_gradient:
            q_BHSK, k_BGSK, v_BGSK = heads(qkv, *shape)
        else:
            q_BHSK, k_BGSK, v_BGSK = split_heads(qkv, self.qkv.bias, *shape)
        if self.query_norm is not None and self.key_norm is not None:
            # Token by token in memory, as attention then leaves its output: the projection reads it without a copy.
            q_BHSK = self.query_norm(q_BHSK.transpose(1, 2)).transpose(1, 2)
            k_BGSK = self.key_norm(k_BGSK.transpose(1, 2)).transpose(1, 2)
        if self.rotated:
            q_BHSK = rotate(q_BHSK, positions_BS, self.rotated, self.rotary_base)
            k_BGSK = rotate(k_BGSK, positions_BS, self.rotated, self.rotary_base)
        mask_B1SS = None if document_ids_BS is None else document_mask(document_ids_BS)
        if self.dropout and self.training:
            assert seeds is not None, NO_SEEDS
            y_BHSK = attention_with_dropout(
                q_BHSK, k_BGSK, v_BGSK, mask_B1SS, self.dropout, seeds, self.first_group, self.num_groups
            )
        else:
            y_BHSK = F.scaled_dot_product_attention(
                q_BHSK,
                k_BGSK,
                v_BGSK,
                attn_mask=mask_B1SS,
                is_causal=mask_B1SS is None,
                enable_gqa=self.queries_per_group > 1,
            )
        return rearrange(y_BHSK, "b h s k -> (b s) (h k)")
