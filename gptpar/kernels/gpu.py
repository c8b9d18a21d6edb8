"""Triton's kernels, where torch comes with it: torch for CPUs does not."""

from __future__ import annotations

import torch

try:
    from gptpar.kernels.triton import adam, bias, loss, norm
except ImportError:
    adam = bias = loss = norm = None  # type: ignore[assignment]


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels are for such tensors: on a GPU and of at most 32 bits."""
    return tensor.is_cuda and tensor.dtype != torch.float64


__all__ = ["adam", "bias", "loss", "norm", "takes"]
