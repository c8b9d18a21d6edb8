"""AdamW on a GPU as :mod:`gptpar.optim.adam_update` defines it (N1 to N6, E1 to E4), in one pass over memory.

Moments in bfloat16 and in 8 bits are rounded as :mod:`gptpar.optim.rounded_states` says.

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
"""Numbers of a step, in this order: scale, rest1, beta2, rest2, floor, size, decay, the bits of the key for rounded
moments, skipped (if it is not 0, the step changes nothing)."""

SECOND_LOW, FIRST_LOW = tl.constexpr(4 * (127 - 56)), tl.constexpr(16 * (127 - 4))
"""See :mod:`gptpar.optim.rounded_states`."""

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
    """:mod:`gptpar.system.hashes` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, draw):
    bits = x.to(tl.uint32, bitcast=True)
    upper = ((tl.where(x == x, bits + draw, 0x7FC00000)) >> 16).to(tl.uint16)
    return upper.to(tl.bfloat16, bitcast=True)


@triton.jit
def _half_exponent(size):
    return ((size >> 23) + 1) >> 1


@triton.jit
def _second_of_8_bits(code):
    wide = code.to(tl.uint32)
    return tl.where(wide == 0, 0, (wide + SECOND_LOW) << 21).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _second_in_8_bits(v, draw):
    size = v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    kept = tl.minimum(tl.maximum(size, (SECOND_LOW + 1) << 21), (SECOND_LOW + 255) << 21)
    return tl.where(size == 0, 0, ((kept + (draw << 5) + 16) >> 21) - SECOND_LOW).to(tl.uint8)


@triton.jit
def _first_of_8_bits(code, v):
    wide, below = code.to(tl.uint32), v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    scaled = (((wide & 127) + FIRST_LOW) << 19).to(tl.float32, bitcast=True) - 0.0625
    size = scaled * ((_half_exponent(below) + 63) << 23).to(tl.float32, bitcast=True)
    return (size.to(tl.uint32, bitcast=True) | ((wide & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _first_in_8_bits(m, v, draw):
    bits, below = m.to(tl.uint32, bitcast=True), v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    size = bits & 0x7FFFFFFF
    inverse = ((191 - _half_exponent(below)) << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    scaled = size.to(tl.float32, bitcast=True) * inverse + 0.0625
    kept = tl.minimum(scaled.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, (FIRST_LOW + 127) << 19)
    code = ((kept + (draw << 3) + 4) >> 19) - FIRST_LOW
    sign = tl.where(size > 0x7F800000, 0, (bits >> 24) & 128)
    return tl.where(below == 0, 0, code | sign).to(tl.uint8)


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
def _store_moments(
    exp_avg, exp_avg_sq, m, v, old_m, old_v, key, inside, FIRST: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    first, second = old_m.to(tl.uint32, bitcast=True), old_v.to(tl.uint32, bitcast=True)
    draws = _mixed(key ^ ((first & 0xFFFF0000) | (second >> 16)))
    kept_v = v
    if SECOND == 1:
        code = _second_in_8_bits(v, draws >> 16)
        tl.store(exp_avg_sq, code, mask=inside)
        kept_v = _second_of_8_bits(code)
    elif SECOND == 2:
        short = _rounded(v, draws >> 16)
        tl.store(exp_avg_sq, short, mask=inside)
        kept_v = short.to(tl.float32)
    else:
        tl.store(exp_avg_sq, v, mask=inside)
    if FIRST == 1:
        tl.store(exp_avg, _first_in_8_bits(m, kept_v, draws & 0xFFFF), mask=inside)
    elif FIRST == 2:
        tl.store(exp_avg, _rounded(m, draws & 0xFFFF), mask=inside)
    else:
        tl.store(exp_avg, m, mask=inside)


@triton.jit
def _update(
    weights, exp_avg, exp_avg_sq, grad, parameters, decays, numbers, length,
    BLOCK: tl.constexpr, WRITES_PARAMETERS: tl.constexpr, SOME_DECAY: tl.constexpr, ELEMENTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,  # bytes of a moment
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    scale, rest1, beta2, rest2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    floor, size, decay, skipped = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 8)
    if skipped == 0.0:
        g = tl.load(grad + at, mask=inside).to(tl.float32) * scale
        old_m, old_v = tl.load(exp_avg + at, mask=inside, other=0), tl.load(exp_avg_sq + at, mask=inside, other=0)
        old_v = _second_of_8_bits(old_v) if SECOND == 1 else old_v.to(tl.float32)
        old_m = _first_of_8_bits(old_m, old_v) if FIRST == 1 else old_m.to(tl.float32)
        m = old_m + rest1 * (g - old_m)
        v = beta2 * old_v + (rest2 * g) * g
        kept = decay
        if SOME_DECAY:
            kept = tl.where(tl.load(decays + at // BLOCK, mask=inside, other=0), decay, 1.0)
        old_w = tl.load(weights + at, mask=inside)
        w = kept * old_w - size * tl.div_rn(m, tl.sqrt_rn(v) + floor)
        tl.store(weights + at, w, mask=inside)
        key = tl.load(numbers + 7).to(tl.uint32, bitcast=True)
        if FIRST == 1 or SECOND == 1:
            key = key ^ old_w.to(tl.uint32, bitcast=True)
        _store_moments(exp_avg + at, exp_avg_sq + at, m, v, old_m, old_v, key, inside, FIRST, SECOND)
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
    """Update vectors [n]; all are fp32 but the gradient, the model parameters and rounded moments.

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
        FIRST=exp_avg.element_size(), SECOND=exp_avg_sq.element_size(),
        num_warps=NUM_WARPS, **IEEE,
    )  # fmt: skip
