"""Attention sinks: a learned logit of each head takes part in the softmax of its scores, and has no value.

So a head's probabilities may sum to less than 1 (gpt-oss, OpenAI 2025). With a sink s, a head's output is that of plain
attention times sigmoid(lse - s), where lse is the logsumexp of the scores. The backward pass is plain attention's, if
it is given that output and logaddexp(lse, s) in place of lse: then both the probabilities and the sums of gradients
times outputs are those of the softmax with the sink.

Legend: B batch, S queries, T keys, N queries of all samples, G key/value heads ("groups"), H query heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gptpar.model.dtypes import in_parts

SINK_CHANNELS = 8
"""Channels that a sink adds to a head where it is a key; kernels take multiples of eight."""


def attention_to_seen(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    seen_B1ST: torch.Tensor | None,
    scale: float | None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention to the keys that a mask names; returns y_BHSK.

    Args:
        seen_B1ST: boolean, [B or 1, 1, S, T]; ``None``: each token sees itself and all earlier ones. With sinks it
            cannot be ``None``.
        scale: factor of the scores; ``None``: 1 / sqrt(K).
        sinks_H: the sinks of this rank's heads; ``None``: there are none.
    """
    width = q_BHSK.shape[-1]
    if sinks_H is not None:
        assert seen_B1ST is not None, "every query sees the sink, so that attention with it is not causal"
        scale = width**-0.5 if scale is None else scale
        q_BHSK, k_BGTK, v_BGTK = _with_sink(q_BHSK, k_BGTK, v_BGTK, sinks_H, scale)
        seen_B1ST = F.pad(seen_B1ST, (0, 1), value=True)
    y_BHSK = F.scaled_dot_product_attention(
        q_BHSK,
        k_BGTK,
        v_BGTK,
        attn_mask=seen_B1ST,
        is_causal=seen_B1ST is None,
        scale=scale,
        enable_gqa=q_BHSK.shape[1] != k_BGTK.shape[1],
    )
    return y_BHSK if sinks_H is None else y_BHSK[..., :width]


def _with_sink(
    q_BHSK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, sinks_H: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with one more key, whose score is the head's sink, and whose value is zero.

    The score comes from ``SINK_CHANNELS`` more channels, which are zero in all other keys. A query's are the sink over
    the scale, and the error of its rounding.
    """
    batch, heads, length, width = q_BHSK.shape
    wanted_H = sinks_H.to(torch.promote_types(sinks_H.dtype, torch.float32)) / scale
    channels_HC = F.pad(torch.stack(in_parts(wanted_H, q_BHSK.dtype, 2), -1), (0, SINK_CHANNELS - 2))
    q_BHSK = torch.cat((q_BHSK, channels_HC[None, :, None].expand(batch, heads, length, -1)), -1)
    sink_1K = F.pad(k_BGTK.new_ones(1, 2), (width, SINK_CHANNELS - 2)).expand(batch, k_BGTK.shape[1], 1, -1)
    k_BGTK = torch.cat((F.pad(k_BGTK, (0, SINK_CHANNELS)), sink_1K), 2)
    return q_BHSK, k_BGTK, F.pad(v_BGTK, (0, SINK_CHANNELS, 0, 1))


@torch.library.custom_op("gptpar::documents_with_sinks", mutates_args=())
def varlen_attention_with_sinks(
    q_NHK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NGK: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    left: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal flash attention inside documents, with sinks; returns (y_NHK, logsumexp_HN with the sink).

    Args:
        cu_queries, cu_keys, max_queries, max_keys: see :func:`torch.nn.attention.varlen.varlen_attn`.
        left: how many earlier tokens a token sees; -1: all.
    """
    y_NHK, lse_HN = _flash(q_NHK, k_NGK, v_NGK, cu_queries, cu_keys, max_queries, max_keys, left, scale)
    total_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype)[:, None])
    y_NHK.mul_((lse_HN - total_HN).exp_().t()[..., None])
    return y_NHK, total_HN


@torch.library.custom_op("gptpar::documents_with_sinks_backward", mutates_args=())
def varlen_attention_with_sinks_backward(
    grad_NHK: torch.Tensor,
    q_NHK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NGK: torch.Tensor,
    y_NHK: torch.Tensor,
    total_HN: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    left: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    tensors = grad_NHK.contiguous(), q_NHK, k_NGK, v_NGK, y_NHK, total_HN, cu_queries, cu_keys
    return _flash_backward(tensors, max_queries, max_keys, left, scale)


def _flash(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, left: int, scale: Any) -> Any:
    """(y_NHK, logsumexp_HN of the scores) of torch's kernel."""
    where, sides = (q, k, v, cu_q, cu_k, max_q, max_k), {"window_size_left": left, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(*where, 0.0, True, False, scale=scale, **sides)[:2]


def _flash_backward(tensors: tuple[Any, ...], max_q: int, max_k: int, left: int, scale: Any) -> Any:
    """Gradients of q, k and v by torch's kernel; without dropout it reads no state of a generator.

    Args:
        tensors: gradient of y, q, k, v, y, logsumexp, and where documents start among queries and keys.
    """
    device, sides = tensors[0].device, {"window_size_left": left, "window_size_right": 0}
    how = 0.0, True, torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    return torch.ops.aten._flash_attention_backward(*tensors, max_q, max_k, *how, scale=scale, **sides)


@varlen_attention_with_sinks.register_fake
def _(q_NHK: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total_HN = q_NHK.new_empty(q_NHK.shape[1], len(q_NHK), dtype=torch.promote_types(q_NHK.dtype, torch.float32))
    return torch.empty_like(q_NHK), total_HN  # with the strides of the queries, as the kernel's


@varlen_attention_with_sinks_backward.register_fake
def _(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, cu_q, cu_k, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, sinks, cu_q, cu_k, *output)


def _gradients(ctx: Any, grad_NHK: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    """The logsumexp has no gradient. A sink's is that of a score whose value is zero."""
    q, k, v, sinks_H, cu_q, cu_k, y_NHK, total_HN = ctx.saved_tensors
    d_q, d_k, d_v = varlen_attention_with_sinks_backward(grad_NHK, q, k, v, y_NHK, total_HN, cu_q, cu_k, *ctx.how)
    products_NH = (grad_NHK.to(total_HN.dtype) * y_NHK).sum(-1)
    shares_HN = (sinks_H.to(total_HN.dtype)[:, None] - total_HN).exp()
    d_sinks_H = -(shares_HN * products_NH.t()).sum(1)
    return d_q, d_k, d_v, d_sinks_H.to(sinks_H.dtype), None, None, *[None] * len(ctx.how)


varlen_attention_with_sinks.register_autograd(_gradients, setup_context=_save)
