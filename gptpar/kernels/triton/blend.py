"""Muon's elementwise parts on a GPU, in one pass over memory each (:class:`gptpar.optim.cpu_adam.CpuMuon`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptpar.kernels.triton.adam import ELEMENTS, IEEE, NUM_WARPS


@triton.jit
def _blend(
    vector, grad, low, scale, share, decay, skipped, length,
    LOOKS_AHEAD: tl.constexpr, WRITES_LOW: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    kept = tl.load(decay)
    if tl.load(skipped) == 0.0:
        fresh = tl.load(share) * (tl.load(grad + at, mask=inside).to(tl.float32) * tl.load(scale))
        new = kept * tl.load(vector + at, mask=inside) + fresh
        tl.store(vector + at, new, mask=inside)
        if LOOKS_AHEAD:
            new = fresh + kept * new
        if WRITES_LOW:
            tl.store(low + at, new.to(low.dtype.element_ty), mask=inside)


def blend(
    vector: torch.Tensor,
    grad: torch.Tensor,
    low: torch.Tensor | None,
    scale: torch.Tensor,
    share: torch.Tensor,
    decay: torch.Tensor,
    skipped: torch.Tensor,
    *,
    looks_ahead: bool,
) -> None:
    """``vector = decay * vector + share * (scale * grad)``, every operation rounded by itself.

    Args:
        vector: [n] fp32, in place.
        grad: [n].
        low: [n] gets the new vector, rounded; ``None``: nothing does.
        looks_ahead: ``low`` gets ``share * (scale * grad) + decay * new vector`` instead.
        scale, share, decay: fp32 scalars.
        skipped: if it is not zero, nothing changes (fp32 scalar).
    """
    length = len(vector)
    _blend[(triton.cdiv(length, ELEMENTS),)](
        vector, grad, vector if low is None else low, scale, share, decay, skipped, length,
        LOOKS_AHEAD=looks_ahead, WRITES_LOW=low is not None, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS, **IEEE,
    )  # fmt: skip
