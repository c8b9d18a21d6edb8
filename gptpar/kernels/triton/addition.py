"""The kernel of :mod:`gptpar.kernels.addition`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptpar.kernels.triton.adam import ELEMENTS, IEEE, NUM_WARPS


@triton.jit
def _add(a, b, total, length, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    fresh = tl.load(b + at, mask=inside).to(tl.float32)
    sums = tl.load(a + at, mask=inside).to(tl.float32) + fresh
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)


def add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> None:
    """``total = a + b`` in fp32, rounded once.

    Args:
        a, b: equally long, contiguous, of at most 32 bits.
        total: the same; it may be one of them.
    """
    length = total.numel()
    _add[(triton.cdiv(length, ELEMENTS),)](a, b, total, length, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS, **IEEE)
