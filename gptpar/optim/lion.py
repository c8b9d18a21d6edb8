"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of a momentum, with one state vector.

With the momentum m::

    change = lr * sign(beta1 * m + (1 - beta1) * g)
    m      = beta2 * m + (1 - beta2) * g

Every element moves by the learning rate in each step, whatever the size of its gradient. Usual learning rates are 3 to
10 times smaller than AdamW's, and weight decays are larger by the same factor. Some gradients are zero but for rounding
(those of the keys' biases). Their elements move as far as others, in the direction of the rounding error, which depends
on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptpar.optim.elementwise import ElementwiseOptimizer


class LionHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def numbers(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """(lr, beta1, 1 - beta1, beta2, 1 - beta2)."""
    one = torch.ones_like(step)
    return how.lr, how.beta1, one - how.beta1, how.beta2, one - how.beta2


def change(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the subtrahend of the decayed weights, and the new momentum."""
    (m,), (lr, beta1, rest1, beta2, rest2) = state, numbers
    return lr * (beta1 * m + rest1 * g).sign(), [beta2 * m + rest2 * g]


LION = ElementwiseOptimizer("lion", ("exp_avg",), LionHyperparameters, numbers, change)
