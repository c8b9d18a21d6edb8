"""Norms of queries and keys, head by head (Dehghani et al. 2023); one pass over memory forward, and one backward.

The backward pass reads the gradients of queries, keys, values and gates and the output of the fused projection, and
writes the gradient of that output. In the same pass it sums the gradients of the norms' weights and biases and of the
projection's bias. The forward pass keeps nothing but the projection's output: the statistics of a head, a few numbers,
are computed again from the head.

Legend: B batch, S sequence, G groups of heads, Q queries of one group, K width of a head. ``qkv`` is the projection's
output, [(B S), (G heads K)], where a group's heads are Q queries, a key, a value, and Q gates if there are gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange

from gptpar.kernels import gpu
from gptpar.kernels.bias_gradient import heads, heads_and_gate


class HeadShape(NamedTuple):
    """The division of the projection's output into heads.

    Attributes:
        seq_length: S.
        queries: Q.
        width: K.
        gated: whether each query has a gate.
    """

    seq_length: int
    queries: int
    width: int
    gated: bool


class HeadNorm(NamedTuple):
    """The parameters of a norm.

    Attributes:
        factor_K: what normalised numbers are multiplied by.
        bias_K: LayerNorm's bias; ``None``: RMSNorm.
    """

    factor_K: torch.Tensor
    bias_K: torch.Tensor | None


def normed_heads(
    qkv: torch.Tensor, bias: torch.Tensor | None, query_norm: HeadNorm, key_norm: HeadNorm, shape: HeadShape, eps: float
) -> tuple[torch.Tensor, ...]:
    """(q_B(GQ)SK, k_BGSK, v_BGSK), and gate_B(GQ)SK if there are gates; queries and keys are normalised.

    Args:
        bias: the projection's, already contained in ``qkv``; the backward pass here returns its gradient.
        eps: added to the variance.
    """
    return _HeadNorms.apply(qkv, bias, *query_norm, *key_norm, *shape, eps)


class _HeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        query_factor_K: torch.Tensor,
        query_bias_K: torch.Tensor | None,
        key_factor_K: torch.Tensor,
        key_bias_K: torch.Tensor | None,
        seq_length: int,
        queries: int,
        width: int,
        gated: bool,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(qkv, query_factor_K, key_factor_K)
        ctx.adds_bias, ctx.eps, ctx.centred = bias is not None, eps, query_bias_K is not None
        q, k, *others = (heads_and_gate if gated else heads)(qkv, seq_length, queries, width)
        if gpu.takes(qkv) and width <= gpu.head_norm.WIDEST:
            norms = query_factor_K, query_bias_K, key_factor_K, key_bias_K
            q, k = gpu.head_norm.head_norms(qkv, *norms, seq_length, queries, gated, eps)
            return q.transpose(1, 2), k.transpose(1, 2), *others
        return _norm(q, query_factor_K, query_bias_K, eps), _norm(k, key_factor_K, key_bias_K, eps), *others

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *gates = grads
        qkv, *factors = ctx.saved_tensors
        grad, of_bias, of_query, of_key = backward(
            q, k, v, gates[0] if gates else None, qkv, *factors, eps=ctx.eps, centred=ctx.centred
        )
        of_norms = [part[n] if n < len(part) else None for part in (of_query, of_key) for n in range(2)]
        return grad, of_bias if ctx.adds_bias else None, *of_norms, None, None, None, None, None


def _norm(x_BHSK: torch.Tensor, factor_K: torch.Tensor, bias_K: torch.Tensor | None, eps: float) -> torch.Tensor:
    # If queries lie token by token in memory, attention writes its output in the same way, and the output projection
    # reads it without a copy.
    x_BSHK, shape = x_BHSK.transpose(1, 2), list(factor_K.shape)
    if bias_K is None:
        return F.rms_norm(x_BSHK, shape, factor_K, eps).transpose(1, 2)
    return F.layer_norm(x_BSHK, shape, factor_K, bias_K, eps).transpose(1, 2)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    qkv: torch.Tensor,
    query_factor_K: torch.Tensor,
    key_factor_K: torch.Tensor,
    *,
    eps: float,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradient of ``qkv``, its sum over tokens, and [1 or 2, K] sums for each norm: queries', then keys'.

    Args:
        q, k, v, gate: gradients of the normalised queries and keys, of values, and of gates if there are gates.
        centred: whether the norms are LayerNorms. Their sums are the gradients of weight and bias; those of RMSNorm
            are the weight's alone.
    """
    if gpu.takes(qkv) and k.shape[3] <= gpu.head_norm.WIDEST:
        return gpu.head_norm.head_norms_backward(q, k, v, gate, qkv, query_factor_K, key_factor_K, eps, centred)
    (_, groups, seq_length, width), gated = k.shape, gate is not None
    x_q, x_k, *_ = (heads_and_gate if gated else heads)(qkv, seq_length, q.shape[1] // groups, width)
    q, of_query = _norm_backward(q, x_q, query_factor_K, eps, centred)
    k, of_key = _norm_backward(k, x_k, key_factor_K, eps, centred)
    parts = [q.unflatten(1, (groups, -1)), k[:, :, None], v[:, :, None]]
    if gate is not None:
        parts.append(gate.unflatten(1, (groups, -1)))
    grad = rearrange(torch.cat(parts, dim=2), "b g h s k -> (b s) (g h k)")
    return grad, grad.sum(0), of_query, of_key


def _norm_backward(
    grad_BHSK: torch.Tensor, x_BHSK: torch.Tensor, factor_K: torch.Tensor, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of ``x``, gradients of the norm's parameters), computed in at least 32 bits."""
    wide = torch.promote_types(x_BHSK.dtype, torch.float32)
    dy, x = grad_BHSK.to(wide), x_BHSK.to(wide)
    if centred:
        x = x - x.mean(-1, keepdim=True)
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, scaled = x * rstd, dy * factor_K
    change = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    sums = [(dy * normed).sum((0, 1, 2))]
    if centred:
        change = change - scaled.mean(-1, keepdim=True)
        sums.append(dy.sum((0, 1, 2)))
    return (change * rstd).to(x_BHSK.dtype), torch.stack(sums).to(factor_K.dtype)
