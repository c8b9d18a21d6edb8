"""The update of AdamW (Loshchilov and Hutter 2019), defined once.

Every implementation takes these operations, in this order, and rounds each to nearest by itself: no product is fused
with a sum, no denormal is flushed. So an element becomes the same bits wherever it is updated. Besides :func:`update`
here, ``csrc/cpu_adam_loop.h`` computes the elements for each instruction set, and ``kernels/triton/adam.py`` both
parts.

The numbers of a step, in fp64, from the gradient's norm and the step's number t = 1, 2, ...::

    N1  divisor = loss_scale * max(1, (norm + 1e-6) / max_norm)         (clipping; max_norm 0: loss_scale)
    N2  scale   = 1 / divisor
    N3  rest1   = 1 - beta1,  rest2 = 1 - beta2,  decay = 1 - lr * weight_decay
    N4  root    = sqrt(1 - power(beta2, t))
    N5  floor   = eps * root
    N6  size    = (lr * root) / (1 - power(beta1, t))

``power(b, t)`` multiplies the squares b, b^2, b^4, ... that t's binary digits name, the lowest first: a library's
``pow`` is not rounded correctly, and differs between processors. Each number is then rounded once to the masters'
dtype, in which the elements follow::

    E1  g = grad * scale
    E2  m = m + rest1 * (g - m)
    E3  v = beta2 * v + (rest2 * g) * g
    E4  p = decay * p - size * (m / (sqrt(v) + floor))

The root of the second moment's bias correction, r, is taken out of the denominator of E4: m / (sqrt(v) / r + eps) is
r * m / (sqrt(v) + r * eps), which is a division less for each element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CLIP_EPS = 1e-6
"""Added to the norm in N1, as torch's ``clip_grad_norm_`` does."""

MAX_STEP_BITS = 31
"""Binary digits of the largest step's number."""

_BLOCK = 1 << 20
"""Elements that :func:`update` takes at a time: its intermediate results are as large."""


class Hyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class UpdateNumbers(NamedTuple):
    """What the elements of one group are updated with (N2 to N6): fp64, or scalar tensors of the masters' dtype."""

    scale: float | Tensor
    rest1: float | Tensor
    beta2: float | Tensor
    rest2: float | Tensor
    floor: float | Tensor
    size: float | Tensor
    decay: float | Tensor


def clipped_divisor(norm: float, loss_scale: float, max_norm: float) -> float:
    """N1.

    Args:
        norm: of the whole gradient, without the loss scale.
        max_norm: largest norm that is not clipped (0: any).
    """
    return loss_scale * max(1.0, (norm + CLIP_EPS) / max_norm) if max_norm > 0 else loss_scale


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` for a non-negative integer, by squaring; see the module's docstring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def step_numbers(how: Hyperparameters, step: int, divisor: float) -> UpdateNumbers:
    """N2 to N6 in fp64."""
    root = math.sqrt(1 - power(how.beta2, step))
    size = how.lr * root / (1 - power(how.beta1, step))
    decay = 1 - how.lr * how.weight_decay
    return UpdateNumbers(1 / divisor, 1 - how.beta1, how.beta2, 1 - how.beta2, how.eps * root, size, decay)


def step_numbers_on_device(
    how: Hyperparameters, steps: Tensor, norm: Tensor, loss_scale: float, max_norm: float, dtype: torch.dtype
) -> UpdateNumbers:
    """N1 to N6 by torch's operators, without waiting for the device.

    Args:
        steps: the step's number, at least 1 (fp64 scalar on the device).
        norm: see :func:`clipped_divisor` (fp64 scalar on the device).
        dtype: of the master parameters.
    """
    # A tensor divided by a number is multiplied by its inverse on GPUs, so every number is a tensor.
    lr, beta1, beta2, eps, weight_decay, scale, largest = (
        torch.full_like(norm, number) for number in (*how, loss_scale, max_norm)
    )
    one = torch.ones_like(norm)
    divisor = scale * ((norm + CLIP_EPS) / largest).clamp(min=1.0) if max_norm > 0 else scale
    root = _root((one - _power_on_device(beta2, steps))[None])[0]
    size = lr * root / (one - _power_on_device(beta1, steps))
    numbers = (one / divisor, one - beta1, beta2, one - beta2, eps * root, size, one - lr * weight_decay)
    return UpdateNumbers(*(number.to(dtype) for number in numbers))


def _power_on_device(base: Tensor, exponent: Tensor) -> Tensor:
    result, left = torch.ones_like(base), exponent.to(torch.int64)
    for _ in range(MAX_STEP_BITS):
        result = torch.where(left % 2 == 1, result * base, result)
        base, left = base * base, left // 2
    return result


@torch.no_grad()
def update(
    state: Sequence[Tensor],
    grad: Tensor,
    numbers: UpdateNumbers,
    *,
    into: Sequence[Tensor] | None = None,
    low: Tensor | None = None,
    skipped: Tensor | None = None,
) -> None:
    """E1 to E4 by torch's operators, on any device; several times slower than the compiled kernels.

    Args:
        state: [n] master parameters, first and second moment, all of one dtype (fp32 or fp64).
        grad: [n] of a dtype not wider than theirs.
        into: where the new state goes; default: in place.
        low: [n] gets the new parameters, rounded to its dtype; it may be ``grad`` itself.
        skipped: not zero where nothing is to change (scalar).
    """
    p, *_ = state
    scalars = UpdateNumbers(*(torch.as_tensor(number, dtype=p.dtype, device=p.device) for number in numbers))
    for start in range(0, len(p), _BLOCK):
        block = slice(start, start + _BLOCK)
        old = [t[block] for t in state]
        new = _updated(old, grad[block].to(p.dtype), scalars)
        if skipped is not None:
            new = [torch.where(skipped == 0, after, before) for after, before in zip(new, old, strict=True)]
        for target, value in zip(into or state, new, strict=True):
            target[block] = value
        if low is not None:
            low[block] = new[0]


def _updated(state: Sequence[Tensor], grad: Tensor, numbers: UpdateNumbers) -> list[Tensor]:
    """E1 to E4: the new p, m and v. Torch fuses nothing here: a sum of two tensors has no factor to be fused with."""
    (p, m, v), n = state, numbers
    g = grad * n.scale
    m = m + n.rest1 * (g - m)
    v = n.beta2 * v + (n.rest2 * g) * g
    return [n.decay * p - n.size * (m / (_root(v) + n.floor)), m, v]


def _root(x: Tensor) -> Tensor:
    """The square root, rounded correctly: torch's on CPUs, by MKL, is off by a unit in the last place now and then."""
    if x.device.type != "cpu":
        return x.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.numpy()))
