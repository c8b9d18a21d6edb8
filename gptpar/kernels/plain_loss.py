"""Cross entropy and its gradient in torch's operators: for CPUs, for fp64, and as the reference of the kernels.

Legend: N tokens, V the vocabulary, or a rank's split of it.
"""

from __future__ import annotations

import torch


def loss_and_grad(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``sum(weights * losses)``, and ``scale`` times its gradient in the logits, in the logits' dtype."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    lse_N = torch.logsumexp(wide_NV, -1)
    loss = ((lse_N - wide_NV.gather(1, labels_N[:, None]).squeeze(1)) * weights_N).sum()
    return loss, share_grad(logits_NV, labels_N, lse_N, weights_N, scale)


def share_statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of this rank's split of the vocabulary.

    Args:
        labels_N: labels minus the first token of this rank's split; a label outside of the split is out of range.

    Returns:
        (maximum_N, sum of exp(logit - maximum)_N, the label's logit_N or 0 if another rank has it)
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    maximum_N = wide_NV.amax(-1)
    is_label_NV = torch.arange(wide_NV.shape[1], device=wide_NV.device) == labels_N[:, None]
    return maximum_N, (wide_NV - maximum_N[:, None]).exp().sum(-1), (wide_NV * is_label_NV).sum(-1)


def share_grad(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, lse_N: torch.Tensor, weights_N: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The gradient in this rank's logits.

    Args:
        labels_N: see :func:`share_statistics`.
        lse_N: logarithm of the sum of exp(logit) over all ranks.
    """
    wide_NV = logits_NV.to(lse_N.dtype)
    is_label_NV = torch.arange(wide_NV.shape[1], device=wide_NV.device) == labels_N[:, None]
    grad_NV = ((wide_NV - lse_N[:, None]).exp() - is_label_NV.to(lse_N.dtype)) * (weights_N * scale)[:, None]
    return grad_NV.to(logits_NV.dtype)
