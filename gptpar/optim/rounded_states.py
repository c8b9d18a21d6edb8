"""Keeps moments in 16 or 8 bits (``--exp-avg-dtype``, ``--exp-avg-sq-dtype``), rounded stochastically.

A second moment moves by a thousandth in a step, and bfloat16 has steps of 1/256: rounded to nearest, it would not move.
Stochastic rounding cuts off the lower bits of an fp32 number, and rounds up with a probability that is the fraction cut
off, so that a moment is right on average. The random numbers come from a counter, not from a generator with a
state. For an element with the old moments m and v, as they are kept, in step t = 1, 2, ...::

    key   = mixed(t)                                            with a moment in 8 bits, ^ the bits of the old weight
    draws = mixed(key ^ (m's upper 16 bits, then v's))          m and v as fp32 numbers
    m     = upper 16 bits of (bits of the new m + the lower 16 bits of draws)
    v     = upper 16 bits of (bits of the new v + the upper 16 bits of draws)

``mixed`` is a permutation of 32 bits (:mod:`gptpar.system.hashes`). All of it is integer arithmetic: torch, Triton
and ``csrc/cpu_adam_loop.h`` give the same bits. The weights follow the new moments before these are rounded.

The old moments take the place of the element's position. They are the same bits in every layout, at every ratio and
after a resume, if the gradients are; and no kernel has to know where in the global tensor its elements are. Elements
whose moments are equal, as all are before the first step, share the draws of one step. Each draw's expected value is
the same, and elements with other moments have other draws. Moments in 8 bits are often equal, weights are not.

**8 bits** (``fp8``) need no scale of a block or a tensor, so that any cutting of a tensor gives the same bits:

- v has 6 bits of exponent and 2 of mantissa, from 1.25 x 2^-56 (whose root is 4.2e-9) to 224; ``v = 0`` is 0 and
  nothing else is, so that no weight is divided by epsilon alone. It is cut off after 2 bits of its mantissa.
- m has a sign and 7 bits of ``|m| / 2^k + 1/16``, 3 of exponent and 4 of mantissa, from 1/16 to 31/2, where 4^k is the
  power of 4 below the new v, as it is kept. ``|m|`` seldom exceeds the root of v, and a change is a multiple of
  their quotient: so the quotient gets equal steps where it is small, and relative ones where it is large.

Both are values of bfloat16, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptpar.system.hashes import mixed, mixed_number

BF16, FP8 = torch.bfloat16, torch.uint8
KEPT_IN = {"bf16": BF16, "fp8": FP8}
"""Name of a format in a flag -> dtype of the vectors of rounded moments."""

SECOND_CUT, SECOND_LOW = 21, 4 * (127 - 56)
"""Bits of v that are cut off, and the remaining ones of the largest number below v's range, as an integer."""
FIRST_CUT, FIRST_LOW, FIRST_OFFSET = 19, 16 * (127 - 4), 1 / 16
"""The same of ``|m| / 2^k + FIRST_OFFSET``; FIRST_LOW is what is left of FIRST_OFFSET itself."""
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000
"""An fp32 number's bits but for the sign, and those of infinity."""


def key_of(step: int) -> int:
    """The key of a step as an unsigned number of 32 bits."""
    return mixed_number(step)


def key_on_device(step: Tensor) -> Tensor:
    """The key of a step (int32 scalar), without waiting for the device.

    Args:
        step: the step's number (fp64 scalar).
    """
    return mixed(step.to(torch.int32))


def draws_of(m: Tensor, v: Tensor, key: Tensor | int) -> Tensor:
    """[n] int32: the random numbers of a step.

    Args:
        m, v: [n] the old moments.
        key: the step's; for moments in 8 bits [n], each combined with the bits of its old weight.
    """
    first, second = (_bits(moment) for moment in (m, v))
    return mixed(((first & -(2**16)) | (second >> 16 & 0xFFFF)) ^ _signed(key))


def rounded(values: Tensor, draw: Tensor) -> Tensor:
    """[n] bfloat16: the values, rounded away from zero with their cut-off fraction as probability.

    Args:
        values: [n] fp32; fp64 is rounded to fp32 before.
        draw: [n] int32 in 0 to 2**16 - 1, uniform.
    """
    wide = values.float()
    upper = (wide.view(torch.int32) + draw >> 16).to(torch.int16).view(BF16)
    return torch.where(wide.isnan(), torch.full_like(upper, torch.nan), upper)


def second_in_8_bits(v: Tensor, draw: Tensor) -> Tensor:
    """[n] uint8: second moments; see :func:`rounded` for the arguments."""
    size = _bits(v) & _SIZE
    kept = size.clamp(SECOND_LOW + 1 << SECOND_CUT, SECOND_LOW + 255 << SECOND_CUT)
    code = (kept + (draw << SECOND_CUT - 16 | 1 << SECOND_CUT - 17) >> SECOND_CUT) - SECOND_LOW
    return torch.where(size == 0, 0, code).to(FP8)


def second_of_8_bits(code: Tensor) -> Tensor:
    """[n] fp32: the second moments."""
    wide = code.to(torch.int32)
    return torch.where(wide == 0, 0, wide + SECOND_LOW << SECOND_CUT).view(torch.float32)


def first_in_8_bits(m: Tensor, v: Tensor, draw: Tensor) -> Tensor:
    """[n] uint8: first moments.

    Args:
        m: [n] fp32; fp64 is rounded to fp32 before.
        v: [n] the second moments, as they are kept.
        draw: see :func:`rounded`.
    """
    bits, below = _bits(m), _bits(v) & _SIZE
    size = bits & _SIZE
    scaled = size.view(torch.float32) * (191 - _half_exponent(below) << 23).view(torch.float32) + FIRST_OFFSET
    kept = (_bits(scaled) & _SIZE).clamp(max=FIRST_LOW + 127 << FIRST_CUT)
    code = (kept + (draw << FIRST_CUT - 16 | 1 << FIRST_CUT - 17) >> FIRST_CUT) - FIRST_LOW
    signed = code | torch.where(size > _INFINITY, 0, bits >> 24 & 128)
    return torch.where(below == 0, 0, signed).to(FP8)


def first_of_8_bits(code: Tensor, v: Tensor) -> Tensor:
    """[n] fp32: the first moments.

    Args:
        v: [n] the second moments, as they are kept.
    """
    wide = code.to(torch.int32)
    scaled = ((wide & 127) + FIRST_LOW << FIRST_CUT).view(torch.float32) - FIRST_OFFSET
    size = scaled * (_half_exponent(_bits(v) & _SIZE) + 63 << 23).view(torch.float32)
    return torch.where(wide > 127, -size, size)


def as_wide(states: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """States in a wider dtype.

    Args:
        states: [n] in their stored number formats; if one is in 8 bits, they are two moments.
    """
    if any(one.dtype == FP8 for one in states):
        m, v = states
        v = second_of_8_bits(v) if v.dtype == FP8 else v
        states = [first_of_8_bits(m, v) if m.dtype == FP8 else m, v]
    return [one.to(dtype) for one in states]


def as_kept(new: Sequence[Tensor], old: Sequence[Tensor], kept: Sequence[Tensor], key: Tensor | int) -> list[Tensor]:
    """New weights and states of an update, converted to their stored number formats.

    Args:
        new, old: [n] weights and states in the dtype of the weights; rounded states are two moments.
        kept: vectors with the number formats.
        key: the step's.
    """
    formats = [one.dtype for one in kept[1:]]
    if not set(KEPT_IN.values()).intersection(formats):
        return list(new)
    (p, m, v), (old_p, old_m, old_v) = new, old
    draws = draws_of(old_m, old_v, _bits(old_p) ^ _signed(key) if FP8 in formats else key)
    return [p, *in_formats(m, v, formats, draws)]


def in_formats(m: Tensor, v: Tensor, formats: Sequence[torch.dtype], draws: Tensor) -> tuple[Tensor, Tensor]:
    """Two moments, rounded to their stored number formats if these are of :data:`KEPT_IN`.

    Args:
        draws: [n] int32: the lower 16 bits are the first moment's, the upper ones the second's.
    """
    lower, upper = draws & 0xFFFF, draws >> 16 & 0xFFFF
    first, second = formats
    wide = v
    if second == FP8:
        v = second_in_8_bits(v, upper)
        wide = second_of_8_bits(v)
    elif second == BF16:
        v = wide = rounded(v, upper)
    if first == FP8:
        return first_in_8_bits(m, wide, lower), v
    return rounded(m, lower) if first == BF16 else m, v


def _bits(values: Tensor) -> Tensor:
    """[n] int32: the bits of the values as fp32 numbers."""
    return values.float().view(torch.int32)


def _half_exponent(size: Tensor) -> Tensor:
    """[n] int32: half of a number's exponent, with the bias and rounded so that 64 is that of 1 and of 2."""
    return (size >> 23) + 1 >> 1


def _signed(key: Tensor | int) -> Tensor | int:
    return key - 2**32 if isinstance(key, int) and key >= 2**31 else key
