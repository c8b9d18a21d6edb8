"""The update of :mod:`gptpar.optim.flat_adam` on a GPU: each element is read and written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ELEMENTS, NUM_WARPS = 2048, 8


@triton.jit
def _update(
    weights, exp_avg, exp_avg_sq, grad, live, decays, numbers, length,
    BLOCK: tl.constexpr, WRITES_LIVE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    rest1, beta2, rest2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    eps, decay, divisor = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    size, root, taken = tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 8) != 0
    w = tl.load(weights + at, mask=inside)
    if taken:
        g = tl.div_rn(tl.load(grad + at, mask=inside).to(tl.float32), divisor)
        old_m, old_v = tl.load(exp_avg + at, mask=inside), tl.load(exp_avg_sq + at, mask=inside)
        m = old_m + (g - old_m) * rest1
        v = old_v * beta2 + rest2 * g * g
        kept = tl.where(tl.load(decays + at // BLOCK, mask=inside, other=0) != 0, decay, 1.0)
        w = w * kept - size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        tl.store(weights + at, w, mask=inside)
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
    if WRITES_LIVE:
        tl.store(live + at, w.to(live.dtype.element_ty), mask=inside)


def update(
    vectors: Sequence[torch.Tensor],
    live: torch.Tensor | None,
    decays: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """See :func:`gptpar.optim.flat_adam.update`; state in fp32."""
    length = len(vectors[0])
    block = -(-length // decays.numel())
    grid = (triton.cdiv(length, ELEMENTS),)
    _update[grid](
        *vectors, vectors[0] if live is None else live, decays, numbers, length,
        BLOCK=block, WRITES_LIVE=live is not None, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
