"""AdamW on a GPU as :mod:`gptpar.optim.adam_update` defines it (N1 to N6, E1 to E4), in one pass over memory.

Moments in bfloat16 are rounded as :mod:`gptpar.optim.rounded_states` says.

By default Triton fuses products with sums, divides approximately, and flushes denormals in libdevice: the kernels here
turn all three off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS, NUM_WARPS = 2048, 8
"""Elements and warps of one Triton program."""

NUM_NUMBERS = 9
"""scale, rest1, beta2, rest2, floor, size, decay, the bits of the key for rounded moments, skipped (not 0: nothing
changes)."""

IEEE = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Launch options: every operation is rounded by itself, denormals are kept."""


@triton.jit
def _power(base, exponent, BITS: tl.constexpr):
    result = tl.full((), 1.0, tl.float64)
    for _ in tl.static_range(BITS):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _mixed(x):
    """:mod:`gptpar.kernels.lowbias` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, draw):
    bits = x.to(tl.uint32, bitcast=True)
    upper = ((tl.where(x == x, bits + draw, 0x7FC00000)) >> 16).to(tl.uint16)
    return upper.to(tl.bfloat16, bitcast=True)


@triton.jit
def _numbers(given, norm, steps, out, BITS: tl.constexpr):
    lr, beta1, beta2 = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    eps, weight_decay, bias_correction = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    loss_scale, max_norm, clip_eps = tl.load(given + 6), tl.load(given + 7), tl.load(given + 8)
    n = tl.load(norm)
    one = tl.full((), 1.0, tl.float64)
    finite = n - n == 0.0
    count = tl.load(steps) + tl.where(finite, one, 0.0)
    tl.store(steps, count)
    step = tl.maximum(count, one).to(tl.int64)
    clips = max_norm > 0.0
    excess = (n + clip_eps) / tl.where(clips, max_norm, one)
    divisor = loss_scale * tl.where(clips & (excess > one), excess, one)
    root = tl.sqrt(one - bias_correction * _power(beta2, step, BITS))
    size = lr * root / (one - bias_correction * _power(beta1, step, BITS))
    tl.store(out, (one / divisor).to(tl.float32))
    tl.store(out + 1, (one - beta1).to(tl.float32))
    tl.store(out + 2, beta2.to(tl.float32))
    tl.store(out + 3, (one - beta2).to(tl.float32))
    tl.store(out + 4, (eps * root).to(tl.float32))
    tl.store(out + 5, size.to(tl.float32))
    tl.store(out + 6, (one - lr * weight_decay).to(tl.float32))
    tl.store(out + 7, _mixed(step.to(tl.uint32)).to(tl.float32, bitcast=True))
    tl.store(out + 8, tl.where(finite, 0.0, 1.0))


def step_numbers(
    given: torch.Tensor, norm: torch.Tensor, steps: torch.Tensor, out: torch.Tensor, max_step_bits: int
) -> None:
    """Count a step and write its numbers.

    Args:
        given: [9] fp64: lr, beta1, beta2, eps, weight decay, bias correction (0 or 1), loss scale, largest norm (0:
            any), clipping's epsilon.
        norm: the gradient's norm, without the loss scale (fp64 scalar); if it is not finite, the step does not count.
        steps: steps so far (fp64 scalar).
        out: [NUM_NUMBERS] fp32.
    """
    _numbers[(1,)](given, norm, steps, out, BITS=max_step_bits, num_warps=1, **IEEE)


@triton.jit
def _update(
    weights, exp_avg, exp_avg_sq, grad, parameters, decays, numbers, length,
    BLOCK: tl.constexpr, WRITES_PARAMETERS: tl.constexpr, SOME_DECAY: tl.constexpr, ELEMENTS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, ROUNDS_SECOND: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    scale, rest1, beta2, rest2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    floor, size, decay, skipped = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 8)
    if skipped == 0.0:
        g = tl.load(grad + at, mask=inside).to(tl.float32) * scale
        old_m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
        old_v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
        m = old_m + rest1 * (g - old_m)
        v = beta2 * old_v + (rest2 * g) * g
        kept = decay
        if SOME_DECAY:
            kept = tl.where(tl.load(decays + at // BLOCK, mask=inside, other=0), decay, 1.0)
        w = kept * tl.load(weights + at, mask=inside) - size * tl.div_rn(m, tl.sqrt_rn(v) + floor)
        tl.store(weights + at, w, mask=inside)
        if ROUNDS_FIRST or ROUNDS_SECOND:
            key = tl.load(numbers + 7).to(tl.uint32, bitcast=True)
            first, second = old_m.to(tl.uint32, bitcast=True), old_v.to(tl.uint32, bitcast=True)
            draws = _mixed(key ^ ((first & 0xFFFF0000) | (second >> 16)))
            m = _rounded(m, draws & 0xFFFF) if ROUNDS_FIRST else m
            v = _rounded(v, draws >> 16) if ROUNDS_SECOND else v
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
        if WRITES_PARAMETERS:
            tl.store(parameters + at, w.to(parameters.dtype.element_ty), mask=inside)


def update(
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    parameters: torch.Tensor | None,
    decays: torch.Tensor | None,
    block: int,
    numbers: torch.Tensor,
) -> None:
    """Update vectors [n]; all are fp32 but the gradient, the model parameters and moments in bfloat16.

    Args:
        parameters: [n] the model parameters to write; ``None``: the weights are the model parameters.
        decays: [blocks] whether each block decays; ``None``: all do.
        block: elements of a block.
        numbers: the step's numbers, see :func:`step_numbers`.
    """
    length = len(weights)
    _update[(triton.cdiv(length, ELEMENTS),)](
        weights, exp_avg, exp_avg_sq, grad, weights if parameters is None else parameters,
        weights if decays is None else decays, numbers, length,
        BLOCK=block, WRITES_PARAMETERS=parameters is not None, SOME_DECAY=decays is not None, ELEMENTS=ELEMENTS,
        ROUNDS_FIRST=exp_avg.dtype == torch.bfloat16, ROUNDS_SECOND=exp_avg_sq.dtype == torch.bfloat16,
        num_warps=NUM_WARPS, **IEEE,
    )  # fmt: skip
