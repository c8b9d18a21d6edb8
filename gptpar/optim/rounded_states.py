"""Keeps moments in bfloat16 (``--exp-avg-dtype``, ``--exp-avg-sq-dtype``), rounded stochastically.

A second moment moves by a thousandth in a step, and bfloat16 has steps of 1/256: rounded to nearest, it would not move.
Stochastic rounding cuts off the lower 16 bits of an fp32 number, and rounds up with the fraction that they are as
probability, so that a moment is right on average. The random numbers come from a counter, not from a generator with a
state. For an element with the old moments m and v, as they are kept, in step t = 1, 2, ...::

    key   = mixed(t)
    draws = mixed(key ^ (m's upper 16 bits, then v's))          m and v as fp32 numbers
    m     = upper 16 bits of (bits of the new m + the lower 16 bits of draws)
    v     = upper 16 bits of (bits of the new v + the upper 16 bits of draws)

``mixed`` is a permutation of 32 bits (:mod:`gptpar.kernels.lowbias`). All of it is integer arithmetic: torch, Triton
and ``csrc/cpu_adam_loop.h`` give the same bits. The weights follow the new moments before these are rounded.

The old moments take the place of the element's position. They are the same bits in every layout, at every ratio and
after a resume, if the gradients are; and no kernel has to know where in the global tensor its elements are. Elements
whose moments are equal, as all are before the first step, share the draws of one step. Each draw's expected value is
the same, and elements with other moments have other draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptpar.kernels.lowbias import mixed, mixed_number

KEPT_IN = torch.bfloat16
"""The number format of rounded moments."""


def key_of(step: int) -> int:
    """The key of a step, without its sign (32 bits)."""
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
        key: the step's.
    """
    first, second = (moment.float().view(torch.int32) for moment in (m, v))
    return mixed(((first & -(2**16)) | (second >> 16 & 0xFFFF)) ^ _signed(key))


def rounded(values: Tensor, draw: Tensor) -> Tensor:
    """[n] bfloat16: the values, rounded away from zero with their cut-off fraction as probability.

    Args:
        values: [n] fp32; fp64 is rounded to fp32 before.
        draw: [n] int32 in 0 to 2**16 - 1, uniform.
    """
    wide = values.float()
    upper = (wide.view(torch.int32) + draw >> 16).to(torch.int16).view(KEPT_IN)
    return torch.where(wide.isnan(), torch.full_like(upper, torch.nan), upper)


def as_kept(new: Sequence[Tensor], old: Sequence[Tensor], kept: Sequence[Tensor], key: Tensor | int) -> list[Tensor]:
    """New weights and states of an update, converted to their stored number formats.

    Args:
        new, old: [n] weights and states in the dtype of the weights; rounded states are two moments.
        kept: vectors with the number formats.
        key: the step's.
    """
    if all(one.dtype != KEPT_IN for one in kept[1:]):
        return list(new)
    (p, *moments), (_, m, v) = new, old
    draws = draws_of(m, v, key)
    halves = draws & 0xFFFF, draws >> 16 & 0xFFFF
    pairs = zip(moments, kept[1:], halves, strict=True)
    return [p, *(rounded(moment, half) if one.dtype == KEPT_IN else moment for moment, one, half in pairs)]


def _signed(key: Tensor | int) -> Tensor | int:
    return key - 2**32 if isinstance(key, int) and key >= 2**31 else key
