"""Cross entropy and its gradient in torch's operators: for CPUs, for fp64, and as the reference of the kernels.

With logits x of one token, its label y and L = logsumexp(x), the loss of the token is::

    L - x[y] + z * L**2             gradient in x:  softmax(x) * (1 + 2 * z * L) - onehot(y)

The second term is the z-loss (PaLM, Chowdhery et al. 2022, section 5; OLMo-2 trains with z = 1e-5). It keeps the
logarithm of the softmax's denominator near 0. With a softcap c (Gemma 2, Riviere et al. 2024) the logits r enter
as x = c * tanh(r / c), so that the gradient in r is the one in x times 1 - (x / c)**2.

Columns that only pad the vocabulary come last. They enter no sum, and their gradient is 0. A rank's split may consist
of padding alone.

Legend: N tokens, V the vocabulary, or a rank's split of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class LossTerms(NamedTuple):
    """Terms of a loss beside the cross entropy.

    Attributes:
        softcap: c of the module's docstring; 0: logits are not capped.
        z_weight: z of the module's docstring.
    """

    softcap: float = 0.0
    z_weight: float = 0.0


CROSS_ENTROPY = LossTerms()


def capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """``softcap * tanh(logits / softcap)``; with a softcap of 0 the logits themselves."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def token_losses(lse_N: torch.Tensor, label_N: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """Each token's loss from its log-sum-exp and its label's logit."""
    losses_N = lse_N - label_N
    return losses_N + terms.z_weight * lse_N.square() if terms.z_weight else losses_N


def loss_and_grad(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    scale: torch.Tensor,
    terms: LossTerms = CROSS_ENTROPY,
    num_valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``sum(weights * losses)``, and ``scale`` times its gradient in the logits, in the logits' dtype.

    Args:
        num_valid: number of columns before those that pad the vocabulary; ``None``: all columns.
    """
    wide_NV = _valid(logits_NV, torch.promote_types(logits_NV.dtype, torch.float32), terms.softcap, num_valid)
    lse_N = torch.logsumexp(wide_NV, -1)
    loss = (token_losses(lse_N, wide_NV.gather(1, labels_N[:, None]).squeeze(1), terms) * weights_N).sum()
    return loss, local_grad(logits_NV, labels_N, lse_N, weights_N, scale, terms, num_valid)


def _valid(logits_NV: torch.Tensor, dtype: torch.dtype, softcap: float, num_valid: int | None) -> torch.Tensor:
    """The capped logits of the valid columns."""
    return capped(logits_NV[:, :num_valid].to(dtype), softcap)


def local_statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, softcap: float = 0.0, num_valid: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of this rank's split of the vocabulary.

    Args:
        labels_N: labels minus the first token of this rank's split; a label outside of the split is out of range.
        num_valid: see :func:`loss_and_grad`.

    Returns:
        (maximum_N, sum of exp(logit - maximum)_N, the label's logit_N or 0 if another rank has it), of capped logits.
        Without valid columns the maximum is the lowest finite number: exp(maximum - that of all ranks) is then 0.
    """
    wide_NV = _valid(logits_NV, torch.promote_types(logits_NV.dtype, torch.float32), softcap, num_valid)
    lowest = torch.finfo(wide_NV.dtype).min
    maximum_N = wide_NV.amax(-1) if wide_NV.shape[1] else wide_NV.new_full(wide_NV.shape[:1], lowest)
    is_label_NV = torch.arange(wide_NV.shape[1], device=wide_NV.device) == labels_N[:, None]
    return maximum_N, (wide_NV - maximum_N[:, None]).exp().sum(-1), (wide_NV * is_label_NV).sum(-1)


def local_grad(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    lse_N: torch.Tensor,
    weights_N: torch.Tensor,
    scale: torch.Tensor,
    terms: LossTerms = CROSS_ENTROPY,
    num_valid: int | None = None,
) -> torch.Tensor:
    """The gradient in this rank's logits; 0 in those of padding.

    Args:
        labels_N, num_valid: see :func:`local_statistics`.
        lse_N: logarithm of the sum of exp(capped logit) over all ranks.
    """
    wide_NV = _valid(logits_NV, lse_N.dtype, terms.softcap, num_valid)
    is_label_NV = torch.arange(wide_NV.shape[1], device=wide_NV.device) == labels_N[:, None]
    softmax_NV = (wide_NV - lse_N[:, None]).exp()
    if terms.z_weight:
        softmax_NV = softmax_NV * (1 + 2 * terms.z_weight * lse_N)[:, None]
    grad_NV = (softmax_NV - is_label_NV.to(lse_N.dtype)) * (weights_N * scale)[:, None]
    if terms.softcap:
        grad_NV = grad_NV * (1 - (wide_NV / terms.softcap).square())
    grad_NV = grad_NV.to(logits_NV.dtype)
    num_padding = logits_NV.shape[1] - grad_NV.shape[1]
    return F.pad(grad_NV, (0, num_padding)) if num_padding else grad_NV
