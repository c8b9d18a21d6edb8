"""The kernel of :mod:`gptpar.kernels.addition`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptpar.kernels.triton.adam import ELEMENTS, IEEE, NUM_WARPS


@triton.jit
def _add(total, addend, length, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    fresh = tl.load(addend + at, mask=inside).to(tl.float32)
    tl.store(total + at, tl.load(total + at, mask=inside) + fresh, mask=inside)


def add(total: torch.Tensor, addend: torch.Tensor) -> None:
    """``total += addend`` in fp32.

    Args:
        total: fp32, contiguous.
        addend: as long, contiguous, of at most 32 bits.
    """
    length = total.numel()
    _add[(triton.cdiv(length, ELEMENTS),)](total, addend, length, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS, **IEEE)
