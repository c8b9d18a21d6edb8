"""Kernels for any update, made of torch's operators; device and CPU give the same bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptpar.optim.elementwise import (
    Change,
    DeviceKernel,
    DeviceStep,
    Done,
    ElementwiseOptimizer,
    HostKernel,
    UpdateVectors,
    divisor_on_device,
    update,
)
from gptpar.optim.matrix_update import MatrixUpdate, average, follow
from gptpar.optim.rounded_states import key_on_device
from gptpar.optim.update import Hyperparameters, Update

_SQUARE_BLOCK = 1 << 16


class GroupNumbers(NamedTuple):
    """The numbers of one group's update, as scalar tensors.

    Attributes:
        scale, decay: see :mod:`gptpar.optim.elementwise`.
        own: the numbers that the optimizer's ``change`` takes.
    """

    scale: Tensor
    decay: Tensor
    own: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> GroupNumbers:
        """The numbers in another dtype, each rounded once."""
        return GroupNumbers(self.scale.to(dtype), self.decay.to(dtype), tuple(number.to(dtype) for number in self.own))


def step_numbers(optimizer: Update, how: Hyperparameters, step: Tensor, divisor: Tensor) -> GroupNumbers:
    """A step's numbers in fp64, on the device of ``step`` and without waiting for it.

    Args:
        step: the step's number, at least 1 (fp64 scalar).
        divisor: of the gradients (fp64 scalar).
    """
    # A tensor divided by a number is multiplied by its inverse on GPUs, so every number is a tensor.
    on_device = optimizer.hyperparameters(*(torch.full_like(step, number) for number in how))
    one = torch.ones_like(step)
    couples_decay = isinstance(optimizer, ElementwiseOptimizer) and optimizer.couples_decay
    decay = on_device.weight_decay if couples_decay else one - on_device.lr * on_device.weight_decay
    return GroupNumbers(one / divisor, decay, tuple(optimizer.numbers(on_device, step)))


class TorchDeviceKernel:
    """Updates vectors in a device's memory. The steps of a :class:`MatrixUpdate` are :class:`MatrixDeviceStep`.

    Args:
        dtype: of the master weights.
    """

    def __init__(self, optimizer: Update, dtype: torch.dtype):
        self._optimizer, self._dtype = optimizer, dtype

    def begin_step(
        self, how: Hyperparameters, norm: Tensor, loss_scale: float, max_norm: float, steps: Tensor
    ) -> DeviceStep:
        skipped = (~norm.isfinite()).float()
        steps += 1 - skipped
        divisor = divisor_on_device(norm, loss_scale, max_norm)
        numbers = step_numbers(self._optimizer, how, steps.clamp(min=1.0), divisor).to(self._dtype)
        if isinstance(self._optimizer, MatrixUpdate):
            return MatrixDeviceStep(self._optimizer, numbers, skipped)
        assert isinstance(self._optimizer, ElementwiseOptimizer)
        return _TorchStep(self._optimizer, numbers, skipped, key_on_device(steps) if self._optimizer.rounded else 0)


@dataclass(frozen=True)
class _TorchStep:
    optimizer: ElementwiseOptimizer
    numbers: GroupNumbers
    skipped: Tensor
    key: Tensor | int

    def update(self, this: UpdateVectors) -> None:
        scale, decay, own = self.numbers
        couples_decay, key = self.optimizer.couples_decay, self.key
        for start, stop, decays in this.ranges:
            *state, grad = (vector[start:stop] for vector in this.vectors)
            low = None if this.parameters is None else this.parameters[start:stop]
            factor = decay if decays else float(not couples_decay)
            change, given = self.optimizer.change, (state, grad, scale, factor, own)
            update(change, *given, low=low, skipped=self.skipped, couples_decay=couples_decay, key=key)


@dataclass(frozen=True)
class MatrixDeviceStep:
    """One step of one family of parameter groups whose matrices are updated as a whole."""

    matrix_update: MatrixUpdate
    numbers: GroupNumbers
    skipped: Tensor

    def average(self, momentum: Tensor, grad: Tensor, out: Tensor) -> None:
        """The first elementwise part: see :func:`~gptpar.optim.matrix_update.average`."""
        scale, _, own = self.numbers
        average(self.matrix_update, momentum, grad, scale, own, out, self.skipped)

    def update(self, this: UpdateVectors) -> None:
        """The second one: the vectors are the master weights and their directions."""
        (lr, *_), one = self.numbers.own, torch.ones_like(self.numbers.decay)
        for start, stop, decays in this.ranges:
            weights, direction = (vector[start:stop] for vector in this.vectors)
            low = None if this.parameters is None else this.parameters[start:stop]
            decay = self.numbers.decay if decays else one
            update(follow, [weights], direction, one, decay, [lr], low=low, skipped=self.skipped)


class TorchHostKernel:
    """Updates vectors in host memory. An order is carried out when the caller waits for it: there is no queue.

    Args:
        threads: of torch, for the banner.
    """

    isa = "torch"
    rounded: Mapping[str, torch.dtype] = MappingProxyType({})

    def __init__(self, optimizer: Update, threads: int):
        self._optimizer, self.threads, self.states = optimizer, threads, optimizer.states

    def step_of(self, how: Hyperparameters, step: int, divisor: float) -> GroupNumbers:
        as_tensor = functools.partial(torch.tensor, dtype=torch.float64)
        return step_numbers(self._optimizer, how, as_tensor(float(step)), as_tensor(divisor))

    def order(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, GroupNumbers]],
        *,
        into: Sequence[Tensor] | None = None,
        low: Tensor | None = None,
        only: np.ndarray | None = None,
    ) -> Callable[[], Done]:
        return functools.partial(timed, functools.partial(self._update, state, grad, ranges, into or state, low))

    def _update(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, GroupNumbers]],
        into: Sequence[Tensor],
        low: Tensor | None,
    ) -> bool:
        finite = True
        for start, stop, numbers in ranges:
            old, new = ([t[start:stop] for t in of] for of in (state, into))
            here, narrow = grad[start:stop], None if low is None else low[start:stop]
            finite &= bool(here.isfinite().all())
            change, (scale, decay, own), coupled = self._change_of(numbers)
            update(change, old, here, scale, decay, own, into=new, low=narrow, couples_decay=coupled)
        return finite

    def _change_of(self, numbers: GroupNumbers) -> tuple[Change, GroupNumbers, bool]:
        """(what changes the elements, with which numbers, whether the weight decay is added to the gradient)"""
        assert isinstance(self._optimizer, ElementwiseOptimizer)
        return self._optimizer.change, numbers, self._optimizer.couples_decay

    def wake(self) -> None: ...

    def square(self, grad: Tensor) -> float:
        return square_by_blocks(grad)


class MatrixHostKernel(TorchHostKernel):
    """Updates matrices in host memory, in two parts: :meth:`order_average` and, with their directions, :meth:`order`.

    Args:
        threads: of torch, for the banner.
    """

    def __init__(self, optimizer: MatrixUpdate, threads: int):
        super().__init__(optimizer, threads)
        self._matrix_update = optimizer

    def order_average(
        self, momentum: Tensor, grad: Tensor, ranges: Sequence[tuple[int, int, GroupNumbers]], out: Tensor
    ) -> Callable[[], Done]:
        """Put the first elementwise part into the queue.

        Args:
            momentum: [n] the state.
            grad: [n].
            ranges: see :meth:`HostKernel.order`.
            out: [n] gets what is to be orthogonalized; what lies between the ranges gets zero.
        """

        def work() -> bool:
            clear_between(ranges, out)
            for start, stop, (scale, _, own) in ranges:
                here = slice(start, stop)
                average(self._matrix_update, momentum[here], grad[here], scale, own, out[here])
            return True

        return functools.partial(timed, work)

    def _change_of(self, numbers: GroupNumbers) -> tuple[Change, GroupNumbers, bool]:
        return follow, numbers._replace(scale=torch.ones_like(numbers.scale), own=numbers.own[:1]), False


def clear_between(ranges: Sequence[tuple[int, int, Any]], vector: Tensor) -> None:
    """Set the elements to zero that are in none of the ranges, which ascend."""
    end = 0
    for start, stop, _ in ranges:
        vector[end:start] = 0
        end = stop
    vector[end:] = 0


def timed(work: Callable[[], bool]) -> Done:
    """Do the work, and take its time."""
    begin = time.monotonic()
    return Done(work(), begin, time.monotonic())


def square_by_blocks(values: Tensor) -> float:
    """Sum of squares in double precision, the same for any number of threads.

    Args:
        values: [n] on the CPU.
    """
    blocks = (block.double().numpy() for block in values.detach().split(_SQUARE_BLOCK))
    return float(sum(float(np.square(block).sum()) for block in blocks))


def make_device_kernel(update: Update, like: Tensor) -> DeviceKernel:
    """The update's fastest kernel for master weights of this dtype on this device."""
    assert isinstance(update, MatrixUpdate | ElementwiseOptimizer)
    fused = None if update.device_kernel is None else update.device_kernel(like)
    return fused or TorchDeviceKernel(update, like.dtype)


def make_host_kernel(update: Update, threads: int) -> HostKernel:
    """The update's fastest kernel for vectors in host memory."""
    if isinstance(update, MatrixUpdate):
        return update.host_kernel(threads) or MatrixHostKernel(update, threads)
    assert isinstance(update, ElementwiseOptimizer)
    return TorchHostKernel(update, threads) if update.host_kernel is None else update.host_kernel(threads)
