"""LayerNorm (Ba et al. 2016) before and after a block's parts; one backward pass over memory computes all gradients.

The residual stream both enters the norm before a part and bypasses it, so its gradient is the sum of two. Nothing but
the norm after a part reads the part's output. In both cases, the sum of the norm's input gradient over all tokens is
the gradient of the bias of the layer before it. The kernel does these additions in the pass that computes the norm's
gradient.

Legend: N tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch

from gptpar.kernels import gpu


def residual_norm(
    x_ND: torch.Tensor,
    added_ND: torch.Tensor | None,
    added_bias_D: torch.Tensor | None,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x + added`` and its normalised values.

    Args:
        added_ND: the output of a layer; ``None``: nothing is added.
        added_bias_D: that layer's bias, already contained in ``added``; the backward pass here returns its gradient.
    """
    return _ResidualNorm.apply(x_ND, added_ND, added_bias_D, weight_D, bias_D, eps)


def output_norm(
    x_ND: torch.Tensor, layer_bias_D: torch.Tensor | None, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """The output of a layer, normalised.

    Args:
        layer_bias_D: that layer's bias, already contained in ``x``; the backward pass here returns its gradient.
    """
    return _OutputNorm.apply(x_ND, layer_bias_D, weight_D, bias_D, eps)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        added_ND: torch.Tensor | None,
        added_bias_D: torch.Tensor | None,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sum_ND = x_ND.view_as(x_ND) if added_ND is None else x_ND + added_ND
        normed_ND, mean_N1, rstd_N1 = torch.native_layer_norm(sum_ND, weight_D.shape, weight_D, bias_D, eps)
        ctx.save_for_backward(sum_ND, mean_N1, rstd_N1, weight_D)
        ctx.adds, ctx.adds_bias = added_ND is not None, added_bias_D is not None
        return sum_ND, normed_ND

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sum_ND: torch.Tensor, grad_normed_ND: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_ND, (of_weight_D, of_bias_D, total_D) = backward(grad_normed_ND, grad_sum_ND, *ctx.saved_tensors)
        return grad_ND, grad_ND if ctx.adds else None, total_D if ctx.adds_bias else None, of_weight_D, of_bias_D, None


class _OutputNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        layer_bias_D: torch.Tensor | None,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        normed_ND, mean_N1, rstd_N1 = torch.native_layer_norm(x_ND, weight_D.shape, weight_D, bias_D, eps)
        ctx.save_for_backward(x_ND, mean_N1, rstd_N1, weight_D)
        ctx.adds_bias = layer_bias_D is not None
        return normed_ND

    @staticmethod
    def backward(ctx: Any, grad_normed_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_ND, (of_weight_D, of_bias_D, total_D) = backward(grad_normed_ND, None, *ctx.saved_tensors)
        return grad_ND, total_D if ctx.adds_bias else None, of_weight_D, of_bias_D, None


def backward(
    grad_normed_ND: torch.Tensor,
    grad_x_ND: torch.Tensor | None,
    x_ND: torch.Tensor,
    mean_N1: torch.Tensor,
    rstd_N1: torch.Tensor,
    weight_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of ``x``; and [3, D]: those of weight and bias, and the sum of the first one over tokens.

    Args:
        grad_x_ND: the gradient of ``x`` from what bypasses the norm; ``None``: nothing does.
    """
    if gpu.takes(x_ND) and x_ND.shape[1] <= gpu.norm.WIDEST:
        return gpu.norm.norm_backward(grad_normed_ND, grad_x_ND, x_ND, mean_N1, rstd_N1, weight_D)
    grad_ND, of_weight_D, of_bias_D = torch.ops.aten.native_layer_norm_backward(
        grad_normed_ND, x_ND, weight_D.shape, mean_N1, rstd_N1, weight_D, weight_D, [True, True, True]
    )
    if grad_x_ND is not None:
        grad_ND = grad_ND + grad_x_ND
    return grad_ND, torch.stack([of_weight_D, of_bias_D, grad_ND.sum(0)])
