"""The output layer and its loss in one, so that the logits of a batch never exist all at once.

With N tokens and a vocabulary of V, logits in fp32 are 4NV bytes: 3.3 GB for 16 x 1,024 tokens and 50,304 pieces.
Here a chunk of tokens at a time gets its logits, its loss and, in training, its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def num_chunks(num_tokens: int, vocab_size: int, element_size: int, device_type: str) -> int:
    """In how many pieces tokens are handled, so that one piece's logits stay within ``CHUNK_BYTES``."""
    tokens_a_chunk = max(1, CHUNK_BYTES[device_type] // (vocab_size * element_size))
    return -(-num_tokens // tokens_a_chunk)


def loss_alone(logits_NV: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """``sum(weights * losses)``, at least in fp32."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    losses_N = torch.logsumexp(wide_NV, -1) - wide_NV.gather(1, labels_N[:, None]).squeeze(1)
    return (losses_N * weights_N).sum()


def loss_and_grad(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum(weights * losses)`` and its gradient in the logits times ``scale``, in the logits' dtype."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    lse_N = torch.logsumexp(wide_NV, -1)
    loss = ((lse_N - wide_NV.gather(1, labels_N[:, None]).squeeze(1)) * weights_N).sum()
    is_label_NV = torch.arange(wide_NV.shape[1], device=wide_NV.device) == labels_N[:, None]
    grad_NV = ((wide_NV - lse_N[:, None]).exp() - is_label_NV.to(wide_NV.dtype)) * (weights_N * scale)[:, None]
    return loss, grad_NV.to(logits_NV.dtype)


@cache
def _kernel(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU compiled, so that no fp32 copy of the logits is ever written to memory."""
    return torch.compile(function, dynamic=False) if device_type == "cuda" else function


class LinearCrossEntropy(torch.autograd.Function):
    """``sum_n weights[n] * cross_entropy(hidden[n] @ weight.T, labels[n])``.

    The gradients are formed in the forward pass, already multiplied by ``scale`` (the loss scale over the number of
    micro-batches): in fp16 they would vanish if they were scaled later. ``backward`` expects that same scale as the
    incoming gradient, and corrects for any other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the scalar loss (fp32 or wider)."""
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        needs_grad = any(ctx.needs_input_grad)
        num_tokens, device = hidden_ND.shape[0], hidden_ND.device.type
        step = -(-num_tokens // num_chunks(num_tokens, weight_VD.shape[0], hidden_ND.element_size(), device))
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        grad_weight_VD: torch.Tensor | None = None
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            logits_NV = hidden_ND[part] @ weight_VD.t()
            if grad_hidden_ND is None:
                loss += _kernel(loss_alone, device)(logits_NV, labels_N[part], weights_N[part])
                continue
            chunk_loss, grad_NV = _kernel(loss_and_grad, device)(logits_NV, labels_N[part], weights_N[part], scale)
            del logits_NV
            loss += chunk_loss
            torch.mm(grad_NV, weight_VD, out=grad_hidden_ND[part])
            contribution_VD = grad_NV.t() @ hidden_ND[part]
            if grad_weight_VD is None:
                grad_weight_VD = contribution_VD if step >= num_tokens else contribution_VD.to(wide)
            else:
                grad_weight_VD += contribution_VD
        if needs_grad:
            assert grad_weight_VD is not None
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), scale)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Gradients of hidden and weight."""
        grad_hidden_ND, grad_weight_VD, scale = ctx.saved_tensors
        ratio = grad_loss / scale
        return (
            grad_hidden_ND * ratio.to(grad_hidden_ND.dtype),
            grad_weight_VD * ratio.to(grad_weight_VD.dtype),
            None,
            None,
            None,
        )
