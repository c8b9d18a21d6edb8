"""Adds 16-bit gradients to each other, or to their sums in fp32.

torch's operator for two dtypes loads and converts element by element, at 1.3 to 2.3 TB/s on an H100. The kernel for
large tensors has wide loads. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptpar.kernels import gpu

MIN_ELEMENTS = 1 << 20
"""A tensor of at least this many elements gets a launch of its own; smaller ones share launches of torch's operator."""


def add_each(totals: Sequence[torch.Tensor], addends: Sequence[torch.Tensor], factor: float) -> None:
    """``total += factor * addend`` for each pair."""
    rest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for total, addend in zip(totals, addends, strict=True):
        if factor == 1 and _takes(total, addend):
            gpu.addition.add(total, addend, total)
        else:
            rest.append((total, addend))
    if rest:
        torch._foreach_add_([total for total, _ in rest], [addend for _, addend in rest], alpha=factor)


def add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> None:
    """``total = a + b`` in fp32 or wider, rounded once.

    Args:
        a, b: fp64 only where ``total`` is.
        total: may be one of them.
    """
    if gpu.takes(total) and all(x.is_contiguous() for x in (a, b, total)):
        gpu.addition.add(a, b, total)
    else:
        total.copy_(a.to(torch.promote_types(a.dtype, torch.float32)) + b)


def _takes(total: torch.Tensor, addend: torch.Tensor) -> bool:
    return (
        total.dtype == torch.float32 != addend.dtype
        and total.numel() >= MIN_ELEMENTS
        and gpu.takes(total)
        and total.is_contiguous()
        and addend.is_contiguous()
    )
