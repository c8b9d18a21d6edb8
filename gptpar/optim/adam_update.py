"""The update of AdamW (Loshchilov and Hutter 2019), defined once.

Every implementation does these operations in this order, and rounds each to nearest by itself: no product is fused with
a sum, no denormal is flushed. So an element gets the same bits wherever it is updated. There are three implementations:
the functions here use torch's operators, ``csrc/cpu_adam_loop.h`` updates the elements (E1 to E4) with each CPU
instruction set, and ``kernels/triton/adam.py`` does both parts on a GPU.

The numbers of a step, in fp64, from the gradient's norm and the step's number t = 1, 2, ...::

    N1  divisor = loss_scale * max(1, (norm + 1e-6) / max_norm)         (clipping; max_norm 0: loss_scale)
    N2  scale   = 1 / divisor
    N3  rest1   = 1 - beta1,  rest2 = 1 - beta2,  decay = 1 - lr * weight_decay
    N4  root    = sqrt(1 - bias_correction * power(beta2, t))
    N5  floor   = eps * root
    N6  size    = (lr * root) / (1 - bias_correction * power(beta1, t))

``power(b, t)`` (:func:`~gptpar.optim.elementwise.power`) multiplies those of b, b^2, b^4, ... whose binary digit in t
is 1, from the lowest digit on. ``bias_correction`` is 1, or 0 to take the moments as they are. Each number is then
rounded once to the dtype of the master weights. The elements are updated in that dtype::

    E1  g = grad * scale
    E2  m = m + rest1 * (g - m)
    E3  v = beta2 * v + (rest2 * g) * g
    E4  p = decay * p - size * (m / (sqrt(v) + floor))

E4 saves one division per element. With the root r of the second moment's bias correction, AdamW's
m / (sqrt(v) / r + eps) equals r * m / (sqrt(v) + r * eps). Every elementwise optimizer shares N1, N2, ``decay``, E1 and
the difference in E4 (:mod:`gptpar.optim.elementwise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptpar.optim.elementwise import power, power_of_tensor, square_root

STATES = ("exp_avg", "exp_avg_sq")
"""The first and the second moment, m and v."""


class AdamHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: float = 1.0


class UpdateNumbers(NamedTuple):
    """The numbers N2 to N6 of one group, in fp64 and in the order of the C struct."""

    scale: float
    rest1: float
    beta2: float
    rest2: float
    floor: float
    size: float
    decay: float

    @property
    def own(self) -> tuple[float, ...]:
        """The numbers that :func:`change` takes."""
        return self[1:6]


def step_numbers(how: AdamHyperparameters, step: int, divisor: float) -> UpdateNumbers:
    """N2 to N6 in fp64."""
    root = math.sqrt(1 - how.bias_correction * power(how.beta2, step))
    size = how.lr * root / (1 - how.bias_correction * power(how.beta1, step))
    decay = 1 - how.lr * how.weight_decay
    return UpdateNumbers(1 / divisor, 1 - how.beta1, how.beta2, 1 - how.beta2, how.eps * root, size, decay)


def numbers(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """N3 to N6 but ``decay``: (rest1, beta2, rest2, floor, size).

    Args:
        how: :class:`AdamHyperparameters` as fp64 scalar tensors; ``step`` is one, too.
    """
    one = torch.ones_like(step)
    root = square_root(one - how.bias_correction * power_of_tensor(how.beta2, step))
    size = how.lr * root / (one - how.bias_correction * power_of_tensor(how.beta1, step))
    return one - how.beta1, how.beta2, one - how.beta2, how.eps * root, size


def change(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """E2 to E4: returns the subtrahend of the decayed weights, and the new moments."""
    (m, v), (rest1, beta2, rest2, floor, size) = state, numbers
    m = m + rest1 * (g - m)
    v = beta2 * v + (rest2 * g) * g
    return size * (m / (square_root(v) + floor)), [m, v]
