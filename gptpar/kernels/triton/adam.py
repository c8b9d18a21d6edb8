"""The update of :class:`~gptpar.optim.flat_adam.FlatAdam` on a GPU, which reads and writes each element once.

The same operations as in ``csrc/cpu_adam_loop.h``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS, NUM_WARPS = 2048, 8
"""Of a program."""


@triton.jit
def _update(
    weights, exp_avg, exp_avg_sq, grad, live, decays, numbers, length,
    BLOCK: tl.constexpr, WRITES_LIVE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    rest1, beta2, rest2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    eps, decay, divisor = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    size, root, skipped = tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 8)
    if skipped == 0.0:
        g = tl.div_rn(tl.load(grad + at, mask=inside).to(tl.float32), divisor)
        old_m, old_v = tl.load(exp_avg + at, mask=inside), tl.load(exp_avg_sq + at, mask=inside)
        m = old_m + (g - old_m) * rest1
        v = old_v * beta2 + rest2 * g * g
        kept = tl.where(tl.load(decays + at // BLOCK, mask=inside, other=0), decay, 1.0)
        w = tl.load(weights + at, mask=inside) * kept
        w -= size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        tl.store(weights + at, w, mask=inside)
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
        if WRITES_LIVE:
            tl.store(live + at, w.to(live.dtype.element_ty), mask=inside)


def update(
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    live: torch.Tensor | None,
    decays: torch.Tensor,
    block: int,
    numbers: torch.Tensor,
) -> None:
    """[n] vectors, fp32 but for the gradient and the live parameters.

    Args:
        decays: [blocks] which blocks decay.
        block: elements of one.
        numbers: [9] in fp32: 1 - beta1, beta2, 1 - beta2, epsilon, 1 - learning rate x weight decay, the gradient's
            divisor, the step's size, the root of the second moment's correction, and not 0 where nothing changes.
    """
    length = len(weights)
    _update[(triton.cdiv(length, ELEMENTS),)](
        weights, exp_avg, exp_avg_sq, grad, weights if live is None else live, decays, numbers, length,
        BLOCK=block, WRITES_LIVE=live is not None, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
