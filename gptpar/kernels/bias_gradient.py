"""Sums a bias's gradient in the same pass that computes the gradient of the layer's output.

A bias's gradient is the sum over all tokens of the gradient of its layer's output. A compiler would sum in a second
pass over that large tensor. Here the layer adds its bias without differentiating it (``bias_gradient=False``), and the
function that reads the layer's output returns both gradients.

Legend: N tokens, F features, B batch, S sequence, G groups of heads, Q queries of one group, K width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

from gptpar.kernels import gpu


def gelu(x_NF: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """GELU (tanh form) of a layer's output; its backward pass also returns the gradient of the layer's bias."""
    return F.gelu(x_NF, approximate="tanh") if bias_F is None else _Gelu.apply(x_NF, bias_F)


def squared_relu(x_NF: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """The squared ReLU (So et al. 2021), likewise."""
    return F.relu(x_NF).square() if bias_F is None else _SquaredRelu.apply(x_NF, bias_F)


SUMMING = {"gelu_tanh": gelu, "squared_relu": squared_relu}
"""The activation functions, by their names in ``--mlp-activation``, that can form a bias's gradient."""


def split_heads(
    qkv: torch.Tensor, bias: torch.Tensor | None, seq_length: int, queries: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`heads` of a layer's output; its backward pass also returns the gradient of the layer's bias."""
    if bias is None:
        return heads(qkv, seq_length, queries, width)
    return _SplitHeads.apply(qkv, bias, seq_length, queries, width)


def heads(
    qkv: torch.Tensor, seq_length: int, queries: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_B(GQ)SK, k_BGSK and v_BGSK of qkv_(BS)(G(Q+2)K); views, but for queries in several groups."""
    parts = rearrange(qkv, "(b s) (g h k) -> b g h s k", s=seq_length, h=queries + 2, k=width)
    q, k, v = parts.split([queries, 1, 1], dim=2)
    return q.flatten(1, 2), k.squeeze(2), v.squeeze(2)


def heads_and_gate(
    qkv: torch.Tensor, seq_length: int, queries: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`heads` where each group also has a gate for each of its queries, gate_B(GQ)SK."""
    parts = rearrange(qkv, "(b s) (g h k) -> b g h s k", s=seq_length, h=2 * queries + 2, k=width)
    q, k, v, gate = parts.split([queries, 1, 1, queries], dim=2)
    return q.flatten(1, 2), k.squeeze(2), v.squeeze(2), gate.flatten(1, 2)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NF)
        return F.gelu(x_NF, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (x_NF,) = ctx.saved_tensors
        if gpu.takes(x_NF):
            return gpu.bias.gelu_backward(grad_NF, x_NF)
        grad_x_NF = torch.ops.aten.gelu_backward(grad_NF, x_NF, approximate="tanh")
        return grad_x_NF, grad_x_NF.sum(0)


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NF)
        return F.relu(x_NF).square()

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (x_NF,) = ctx.saved_tensors
        if gpu.takes(x_NF):
            return gpu.bias.squared_relu_backward(grad_NF, x_NF)
        grad_x_NF = grad_NF * (2 * F.relu(x_NF))
        return grad_x_NF, grad_x_NF.sum(0)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, bias: torch.Tensor, seq_length: int, queries: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return heads(qkv, seq_length, queries, width)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        if gpu.takes(grad_q):
            grad, grad_bias = gpu.bias.merge_heads(grad_q, grad_k, grad_v)
        else:
            groups = grad_k.shape[1]
            parts = [grad_q.unflatten(1, (groups, -1)), grad_k[:, :, None], grad_v[:, :, None]]
            grad = rearrange(torch.cat(parts, dim=2), "b g h s k -> (b s) (g h k)")
            grad_bias = grad.sum(0)
        return grad, grad_bias, None, None, None
