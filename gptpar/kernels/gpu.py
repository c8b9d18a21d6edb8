"""Imports the Triton kernels where Triton is installed; a GPU build of torch without Triton gets a warning."""

from __future__ import annotations

import warnings

import torch

try:
    from gptpar.kernels.triton import adam, addition, bias, blend, copies, gate, head_norm, loss, norm, product
except ImportError as missing:
    adam = addition = bias = blend = copies = gate = head_norm = loss = norm = product = None  # type: ignore[assignment]
    if torch.version.cuda or torch.version.hip:
        warnings.warn(f"Triton cannot be imported ({missing}): GPUs take torch's operators instead", stacklevel=2)


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels support a tensor: it is on a GPU, and its numbers have at most 32 bits."""
    return loss is not None and tensor.is_cuda and tensor.dtype != torch.float64


__all__ = ["adam", "addition", "bias", "blend", "copies", "gate", "head_norm", "loss", "norm", "product", "takes"]
