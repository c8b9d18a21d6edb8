"""The elementwise optimizers of ``torch.optim`` beside AdamW, each with the states and the formula of torch's own.

All of them couple the weight decay: it is added to the gradient. Groups have torch's hyperparameters by torch's names.
A state that some hyperparameters leave unused takes no memory: momentum 0 has no momentum buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptpar.optim.adam_update import STATES, AdamHyperparameters, numbers
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer, square_root

Changed = tuple[Tensor, list[Tensor]]

ADAM = replace(ADAMW, name="adam_l2", couples_decay=True, device_kernel=None, host_kernel=None)
"""Adam (Kingma and Ba 2015) with L2 regularisation."""


def _change_amsgrad(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> Changed:
    (m, v, largest), (rest1, beta2, rest2, floor, size) = state, numbers
    m = m + rest1 * (g - m)
    v = beta2 * v + (rest2 * g) * g
    largest = torch.maximum(largest, v)
    return size * (m / (square_root(largest) + floor)), [m, v, largest]


AMSGRADW = ElementwiseOptimizer("amsgradw", (*STATES, "max_exp_avg_sq"), AdamHyperparameters, numbers, _change_amsgrad)
"""AdamW by the largest second moment so far (Reddi et al. 2018)."""

AMSGRAD = replace(AMSGRADW, name="amsgrad", couples_decay=True)
"""AMSGrad with L2 regularisation: the decay is added to the gradient."""


class SgdHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step; ``nesterov`` is 0 or 1."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: float


def _numbers_of_sgd(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """(lr, momentum, the gradient's weight in the momentum, its weight in the step, the momentum's weight there)."""
    one = torch.ones_like(step)
    is_whole = (step == 1) | (how.momentum == 0)  # torch's first momentum is the whole gradient
    taken = torch.where(is_whole, one, one - how.dampening)
    return how.lr, how.momentum, taken, how.nesterov, torch.where(how.nesterov == 1, how.momentum, one)


def _change_by_momentum(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> Changed:
    (buffer,), (lr, momentum, taken, of_gradient, of_buffer) = state, numbers
    buffer = momentum * buffer + taken * g
    return lr * (of_gradient * g + of_buffer * buffer), [buffer]


def _change_by_gradient(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> Changed:
    return numbers[0] * g, []


@cache
def sgd(*, momentum: bool) -> ElementwiseOptimizer:
    """Stochastic gradient descent; ``momentum``: whether any group has one."""
    states, change = (("momentum_buffer",), _change_by_momentum) if momentum else ((), _change_by_gradient)
    return ElementwiseOptimizer("sgd", states, SgdHyperparameters, _numbers_of_sgd, change, couples_decay=True)


class AdagradHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    initial_accumulator_value: float


def _numbers_of_adagrad(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """(present rate, eps, what the sum begins with)."""
    one = torch.ones_like(step)
    begin = torch.where(step == 1, how.initial_accumulator_value, torch.zeros_like(step))
    return how.lr / (one + (step - one) * how.lr_decay), how.eps, begin


def _change_by_sum(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> Changed:
    (total,), (rate, eps, begin) = state, numbers
    total = (total + begin) + g * g
    return rate * (g / (square_root(total) + eps)), [total]


ADAGRAD = ElementwiseOptimizer(
    "adagrad", ("sum",), AdagradHyperparameters, _numbers_of_adagrad, _change_by_sum, couples_decay=True
)
"""Adagrad (Duchi et al. 2011)."""


class RmspropHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    alpha: float
    eps: float
    weight_decay: float
    momentum: float


def _numbers_of_rmsprop(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """(lr, alpha, 1 - alpha, eps, momentum)."""
    return how.lr, how.alpha, torch.ones_like(step) - how.alpha, how.eps, how.momentum


@cache
def rmsprop(*, momentum: bool, centered: bool) -> ElementwiseOptimizer:
    """RMSprop (Hinton 2012).

    Args:
        momentum: whether any group has one.
        centered: whether gradients are divided by their standard deviation (Graves 2013).
    """

    def change(g: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> Changed:
        (square, *others), (lr, alpha, rest, eps, factor) = state, numbers
        square = alpha * square + (rest * g) * g
        new, divisor = [square], square
        if centered:
            mean = others[-1] + rest * (g - others[-1])
            new, divisor = [square, mean], square - mean * mean
        step = g / (square_root(divisor) + eps)
        if momentum:
            step = factor * others[0] + step
            new.insert(1, step)
        return lr * step, new

    states = ("square_avg", *["momentum_buffer"] * momentum, *["grad_avg"] * centered)
    numbers = _numbers_of_rmsprop
    return ElementwiseOptimizer("rmsprop", states, RmspropHyperparameters, numbers, change, couples_decay=True)
