"""Causal self-attention: projections, grouped queries, rotary positions or distances, query and key norms, output gate.

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
from gptpar.kernels.head_norm import HeadShape, normed_heads
from gptpar.model.attention_sinks import SINK_CHANNELS
from gptpar.model.core_attention import AttentionDropout, AttentionRule, core_attention
from gptpar.model.dropout import NO_SEEDS, LayerSeeds
from gptpar.model.dtypes import in_parts
from gptpar.model.head_exchange import HeadExchange
from gptpar.model.linear import Linears, Reader
from gptpar.model.mup import attention_scale
from gptpar.model.norm import Norm, WidthRMSNorm, make_norm, norm_arguments, norm_over_width
from gptpar.model.rotary import Rotary, rotate
from gptpar.model.varlen_attention import has_varlen_kernel
from gptpar.tensor_parallel import TensorAxis
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.topology.initial_values import Normal
from gptpar.topology.matrices import Interleaved
from gptpar.topology.placement import ParameterSpec

DISTANCE_CHANNELS = 8
"""Channels that ALiBi adds to a head: kernels take multiples of eight."""
_DIGITS, _BASE = 3, 256
"""Number and base of the digits of a token's position in ALiBi's channels: positions up to 16 million."""

VARLEN_SPEED = 0.55
"""Speed of flash attention of variable length, as a fraction of that of cuDNN's kernel for whole samples (H200)."""


def document_kernel(model: ModelConfig, device_type: str, dtype: torch.dtype) -> str:
    """The way in which :func:`~gptpar.model.core_attention.core_attention` keeps documents apart, in words."""
    width = model.kv_channels + DISTANCE_CHANNELS * (model.position_embedding_type == "alibi")
    if has_varlen_kernel(device_type, dtype, width):
        return "flash attention of variable length"
    return "masks in memory" if device_type == "cuda" or model.attention_dropout else "a call for each document"


def window_of(model: ModelConfig, layer: int) -> int | None:
    """Number of tokens that a layer's token sees, itself among them; ``None``: all earlier ones."""
    pattern = model.window_pattern or "S"
    if model.window_size is None or pattern[layer % len(pattern)] == "F":
        return None
    return model.window_size if model.window_size < model.seq_length else None


def is_rotary(model: ModelConfig, layer: int) -> bool:
    """Whether positions turn a layer's queries and keys, if the model has rotary positions."""
    pattern = model.rope_pattern or "R"
    return pattern[layer % len(pattern)] == "R"


def head_slopes(first: int, count: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """slopes_H of consecutive heads (Press et al. 2022), fp64.

    With p the largest power of two up to the number of heads, head i < p has the slope 2^(-8 (i + 1) / p), and head
    p + k has 2^(-4 (2 k + 1) / p).
    """
    power = 1 << (num_heads.bit_length() - 1)
    heads_H = torch.arange(first, first + count, dtype=torch.float64, device=device)
    exponents_H = torch.where(heads_H < power, 8 * (heads_H + 1) / power, 4 * (2 * (heads_H - power) + 1) / power)
    return torch.exp2(-exponents_H)


def with_distances(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    positions_BS: torch.Tensor | None,
    slopes_H: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with ``DISTANCE_CHANNELS`` more channels, so that any attention kernel computes ALiBi.

    To the score of a query at position i and a key at position j, the channels add ``slope * j``. Softmax does not
    change when a row's scores change by the same number, so this equals ALiBi's ``slope * (j - i)``. A key's channels
    are the position's digits, which 16 bits hold exactly. A query's are the slope and the error of its rounding. The
    values' channels are zero; the caller drops them from the output.

    Args:
        positions_BS: each token's position; ``None``: 0, 1, 2, ...
        slopes_H: the slopes of this rank's query heads.
        scale: the factor of the scores, by which slopes are divided.
    """
    (batch, heads, length, _), dtype = q_BHSK.shape, q_BHSK.dtype
    positions = torch.arange(length, device=k_BGSK.device)[None] if positions_BS is None else positions_BS
    wanted_H = slopes_H / scale
    rounded_H, rest_H = in_parts(wanted_H, dtype, 2)
    of_queries, of_keys = [], []
    for digit in range(_DIGITS):
        factor = _BASE ** (digit / 2)  # half of the digit's weight on each side: fp16 ends at 65,504
        of_queries += [rounded_H * factor, rest_H * factor]
        of_keys += [((positions // _BASE**digit) % _BASE).to(dtype) * factor] * 2
    unused = DISTANCE_CHANNELS - len(of_keys)
    of_queries += [torch.zeros_like(rounded_H)] * unused
    of_keys += [torch.zeros_like(of_keys[0])] * unused
    q_more = torch.stack(of_queries, -1)[None, :, None].expand(batch, heads, length, -1)
    k_more = torch.stack(of_keys, -1)[:, None].expand(batch, k_BGSK.shape[1], length, -1)
    v_more = torch.zeros_like(k_more)
    return torch.cat((q_BHSK, q_more), -1), torch.cat((k_BGSK, k_more), -1), torch.cat((v_BGSK, v_more), -1)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionRule], torch.Tensor]
"""A function that takes the arguments of :func:`core_attention`, and returns the same."""


class Attention(nn.Module):
    """Fused QKV projection, scaled dot-product attention, output projection.

    A model may normalise queries and keys in two ways. Head by head (Dehghani et al. 2023), all heads have one norm of
    a head's width; each tensor rank holds it whole and applies it to its own heads. Over the channels of all heads
    together (OLMo et al. 2024), each tensor rank holds the part of the norm's weight that belongs to its heads.

    Rows of the QKV weight are ordered by group: the group's query heads, its key head, its value head (Megatron's
    order), then the gates of its query heads if the model has gates. So a contiguous slice is a set of whole groups. A
    gate multiplies the attention's output, channel by channel, by its sigmoid (Qiu et al. 2025). A model may learn a
    sink for each query head (:mod:`gptpar.model.attention_sinks`).

    Args:
        linears: makes the projections.
        window: how many tokens a token sees, itself among them; ``None``: all earlier ones.
        rotary: whether positions turn its queries and keys, if the model has rotary positions.
        recompute_core: whether everything but the projections is computed again in the backward pass.

    Attributes:
        attend: :func:`core_attention`; while text is generated, a cache of keys and values instead.
        exchange: attention that exchanges tokens, instead of ``attend``.
    """

    def __init__(
        self, linears: Linears, *, window: int | None = None, rotary: bool = True, recompute_core: bool = False
    ):
        super().__init__()
        config, axis = linears.config, linears.axis
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        self.rotary = Rotary.of(config) if rotary else None
        self.dropout = config.attention_dropout
        self.num_groups = config.num_query_groups
        self.first_group = axis.rank * (config.num_query_groups // axis.size)
        self.window, self.gated, self.recompute_core = window, config.attention_output_gate, recompute_core
        self.axis, self.scale = axis, attention_scale(config)
        self.has_distances = config.position_embedding_type == "alibi"
        self.attend: Attend = core_attention
        self.exchange: HeadExchange | None = None
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        heads = config.num_attention_heads * config.kv_channels
        queries, one = self.queries_per_group * self.head_width, self.head_width
        of_group = Interleaved((queries, one, one, *[queries] * self.gated), one)
        outputs = config.num_query_groups * sum(of_group.lengths)
        query_norm, key_norm = _norms(config, axis)
        has_kernel = query_norm is not None and query_norm.of_head is not None
        reader = Reader.NORMED_HEADS if has_kernel else Reader.HEADS
        self.qkv = linears.column(config.hidden_size, outputs, bias=qkv_bias, reader=reader, matrices=of_group)
        self.query_norm, self.key_norm = query_norm, key_norm
        sinks = ParameterSpec(Normal(config.init_method_std), axis.split(0, config.num_attention_heads))
        has_sinks, own_heads = config.softmax_type == "learnable", config.num_attention_heads // axis.size
        self.declared = {"sinks": sinks} if has_sinks else {}
        self.sinks = nn.Parameter(torch.empty(own_heads)) if has_sinks else None
        self.out = linears.row(heads, config.hidden_size, bias=config.add_bias_linear, reader=Reader.STREAM)

    def forward(
        self,
        x_ND: torch.Tensor,
        positions_BS: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
    ) -> torch.Tensor:
        """Returns y_ND; for the arguments see :meth:`gptpar.model.block.Block.forward`."""
        core = (
            partial(checkpoint, self.core, use_reentrant=False, preserve_rng_state=False)
            if self.recompute_core and self.training
            else self.core
        )
        return self.out(core(self.qkv(x_ND), positions_BS, cu_seqlens, seq_length, seeds))

    def core(
        self,
        qkv: torch.Tensor,
        positions_BS: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
    ) -> torch.Tensor:
        """Attention without its projections: from all tokens' queries, keys and values to y_N(HK)."""
        q_BHSK, k_BGSK, v_BGSK, *gates = self._heads(qkv, seq_length)
        if self.rotary:
            q_BHSK, k_BGSK = rotate((q_BHSK, k_BGSK), positions_BS, self.rotary)
        dropout = None
        if self.dropout and self.training:
            assert seeds is not None, NO_SEEDS
            dropout = AttentionDropout(self.dropout, seeds, self.first_group, self.num_groups)
        scale = self.scale
        if self.has_distances:
            scale = scale or self.head_width**-0.5  # of the head without the channels for distances
            first, num_heads = (count * self.queries_per_group for count in (self.first_group, self.num_groups))
            slopes_H = head_slopes(first, q_BHSK.shape[1], num_heads, q_BHSK.device)
            q_BHSK, k_BGSK, v_BGSK = with_distances(q_BHSK, k_BGSK, v_BGSK, positions_BS, slopes_H, scale)
        rule = AttentionRule(cu_seqlens, dropout, self.window, scale, self.sinks)
        if self.exchange is None:
            y_BHSK = self.attend(q_BHSK, k_BGSK, v_BGSK, rule)
        else:
            y_BHSK = self.exchange.unpack(self.exchange.attend(self.exchange.pack(q_BHSK, k_BGSK, v_BGSK), rule))
        if self.has_distances:
            y_BHSK = y_BHSK[..., : self.head_width]
        for gate_BHSK in gates:
            y_BHSK = y_BHSK * gate_BHSK.sigmoid()
        return rearrange(y_BHSK, "b h s k -> (b s) (h k)")

    def by_group(self, qkv: torch.Tensor) -> torch.Tensor:
        """A view [G, heads, K, ...] of the whole QKV weight or bias: a group's queries, its key, value and gates."""
        return qkv.view(self.num_groups, -1, self.head_width, *qkv.shape[1:])

    def cost(self, batch: BatchShape) -> Cost:
        """The cost of both projections and of what is between them."""
        qkv, out, core = self.qkv.cost(batch), self.out.cost(batch), self._core_cost(batch)
        if self.recompute_core:
            core = core.computed_again(core.workspace)
        return qkv + core + out

    def _core_cost(self, batch: BatchShape) -> Cost:
        """The cost between the projections: kernels keep what they read and write, but for the projection's input."""
        groups = self.num_groups // self.axis.size
        heads, has_norms = groups * self.queries_per_group, self.query_norm is not None
        queries, keys = heads * self.head_width, groups * self.head_width
        over_width, added = isinstance(self.query_norm, WidthRMSNorm), self._added_channels(batch)
        projected = self.qkv.weight.shape[0]
        kept: float = projected if has_norms or not added else 0  # values are a view of it
        if added:
            kept += (heads + 2 * groups) * (self.head_width + added)
        elif has_norms or self.rotary:
            kept += queries + keys
        kept += (queries + keys) * over_width  # before the norms' factor
        # Cosines and sines, of which all samples have the same.
        kept += getattr(self.rotary, "rotated", 0) * batch.seq_length / batch.tokens
        if self.rotary or self.gated or added:  # the projection reads a copy of the kernel's output
            kept += heads * (self.head_width + added) + queries * self.gated
        if self._calls_by_document(batch) and (self.gated or not (self.rotary or added)):
            kept += queries  # their outputs are put together in a copy
        seen, masked, mask_bytes = self._pairs(batch)
        normed, size = (queries + keys) * has_norms, batch.dtype.itemsize
        return Cost(
            attention=4.0 * queries * seen,
            masked=4.0 * queries * masked,
            forward=2 * normed + 4 * queries * self.gated,
            backward=normed + 6 * queries * self.gated,
            small_sums=int(over_width and self.axis.size > 1),
            kept=kept * size + (heads + 2 * over_width) * batch.statistic_size + mask_bytes,
            workspace=projected * size,
        )

    def _pairs(self, batch: BatchShape) -> tuple[float, float, float]:
        """Per token: mean number of keys that it sees, number of lost keys, bytes of its mask.

        The number of lost keys measures lost time: so many further keys could be computed in that time. A mask in
        memory loses time, and so does flash attention of variable length, which is slower.
        """
        length, has_documents = batch.seq_length, batch.document_lengths is not None
        lengths, window = batch.document_lengths or (length,), self.window or length
        tokens, size = sum(lengths), batch.dtype.itemsize
        seen = sum(_pairs_seen(one, window) for one in lengths) / tokens
        unmasked = window * (self.sinks is None)  # tokens of a sample that is computed without a mask, at most
        if not has_documents and unmasked >= length:
            return seen, 0.0, 0.0
        if self._has_kernel(batch):
            return seen, seen / VARLEN_SPEED - seen, 0.0
        if self._calls_by_document(batch):
            masked = [one for one in lengths if one > unmasked]
            hidden = sum(one * one - _pairs_seen(one, window) for one in masked)
            return seen, hidden / tokens, sum(one * one for one in masked) / tokens * size
        rows = batch.rows_of_masks if has_documents else length / batch.tokens
        return seen, length - seen, rows * length * size

    def _added_channels(self, batch: BatchShape) -> int:
        """Number of channels added to each head: for distances, and for a sink that is a key."""
        is_key = self.sinks is not None and not self._has_kernel(batch)
        return DISTANCE_CHANNELS * self.has_distances + SINK_CHANNELS * is_key

    def _has_kernel(self, batch: BatchShape) -> bool:
        """Whether flash attention of variable length computes windows, documents and sinks."""
        width = self.head_width + DISTANCE_CHANNELS * self.has_distances
        return has_varlen_kernel(batch.device_type, batch.dtype, width)

    def _calls_by_document(self, batch: BatchShape) -> bool:
        """Whether attention is a call for each document (:func:`gptpar.model.core_attention.one_call_a_document`)."""
        return batch.document_lengths is not None and batch.device_type == "cpu" and self.dropout == 0

    def _heads(self, qkv: torch.Tensor, seq_length: int) -> tuple[torch.Tensor, ...]:
        """(q_BHSK, k_BGSK, v_BGSK), and gate_BHSK if there are gates; normalised if the model normalises them."""
        shape = HeadShape(seq_length, self.queries_per_group, self.head_width, self.gated)
        bias, query_norm, key_norm = self.qkv.unsummed_bias, self.query_norm, self.key_norm
        if query_norm is not None and key_norm is not None:
            of_query, of_key = query_norm.of_head, key_norm.of_head
            if of_query is not None and of_key is not None:
                return normed_heads(qkv, bias, of_query, of_key, shape, query_norm.eps)
        if self.gated:
            q_BHSK, k_BGSK, *others = heads_and_gate(qkv, *shape[:3])
        else:
            q_BHSK, k_BGSK, *others = split_heads(qkv, bias, *shape[:3])
        if isinstance(query_norm, WidthRMSNorm) and isinstance(key_norm, WidthRMSNorm):
            q_BHSK, k_BGSK = norm_over_width(query_norm, key_norm, q_BHSK, k_BGSK, self.axis)
        elif query_norm is not None and key_norm is not None:
            q_BHSK, k_BGSK = query_norm(q_BHSK), key_norm(k_BGSK)
        return q_BHSK, k_BGSK, *others


def _norms(config: ModelConfig, axis: TensorAxis) -> tuple[Norm | None, Norm | None]:
    """The norms of queries and of keys; ``None`` if the model has none."""
    if not config.qk_layernorm:
        return None, None
    width = config.kv_channels
    if config.qk_layernorm_scope == "width":
        how = norm_arguments(config)
        return (
            WidthRMSNorm(config.num_attention_heads * width, axis=axis, **how),
            WidthRMSNorm(config.num_query_groups * width, axis=axis, **how),
        )
    norm = partial(make_norm, config, width, axis.inside_layers)
    return norm(), norm()


def _pairs_seen(length: int, window: int) -> float:
    """Pairs of a document's tokens that see each other: half of the square, less what a window hides."""
    window = min(window, length)
    return window * length - window * window / 2
