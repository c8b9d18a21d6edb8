"""Gives updates of buckets to the CPU optimizer's kernel, and sends the new parameters to the device when it is done.

The kernel works on one bucket while Python sends the previous bucket's parameters and prepares the next bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gptpar.offload.buckets import Bucket, Buffers
from gptpar.offload.events import What
from gptpar.offload.shared_state import SharedState
from gptpar.offload.step_request import KernelNumbers, StepHyperparameters
from gptpar.offload.transfers import MAX_UNSENT, D2HCopy, H2DCopy
from gptpar.optim.elementwise import Done, HostKernel

MAX_QUEUED = MAX_UNSENT - 1
"""Updates that the thread gives to the kernel before it waits for their ends, while gradients still come. With one at a
time, the thread took Python's lock from the backward pass after each bucket, and a layer took more than twice as
long."""

LEFT = 2
"""Updates that the kernel still has when the thread goes on. The thread may wait for Python's lock almost as long as
the kernel needs for a bucket; with one update left, the kernel was idle after each wait."""


class QueuedUpdate(NamedTuple):
    """An update that the kernel works on, or will.

    Attributes:
        copy: copies the new parameters to the device.
        wait: returns when the kernel is done.
        read: the gradient that the kernel reads; released after the update if ``ends_with`` is ``None``.
        into: the memory of the new state; ``None``: that of the old one.
        ends_with: the event with which the update ends the bucket's step; ``None``: it does not end the step.
        sends: whether the new parameters are sent when the kernel is done.
    """

    bucket: Bucket
    copy: H2DCopy
    wait: Callable[[], Done]
    read: D2HCopy
    into: Buffers | None
    ends_with: What | None
    sends: bool


class KernelQueue:
    """The updates, in the order in which the kernel works on them.

    The updating thread calls it; the training loop only while no step is requested and no gradient is there.

    Args:
        kernels: by parameter group.
    """

    def __init__(self, shared: SharedState, kernels: Sequence[HostKernel]):
        self._shared, self._transfers = shared, shared.transfers
        self._updates: deque[QueuedUpdate] = deque()
        self.use_kernels(kernels)

    def use_kernels(self, kernels: Sequence[HostKernel]) -> None:
        """Use other kernels for the coming steps, by parameter group."""
        self._kernels, self._numbers = kernels, KernelNumbers(kernels)

    def __len__(self) -> int:
        return len(self._updates)

    def wake(self) -> None:
        """Wake the kernels' threads: there will be work in a moment."""
        for kernel in dict.fromkeys(self._kernels):
            kernel.wake()

    def begin(
        self,
        bucket: Bucket,
        hyperparameters: StepHyperparameters,
        ends_with: What | None,
        *,
        aside: bool,
        only: np.ndarray | None = None,
        sends: bool = True,
    ) -> None:
        """Give the kernel an update, and finish previous updates while the kernel works.

        Args:
            ends_with, sends: see :class:`QueuedUpdate`.
            aside: whether the new state goes to the double buffer; else it takes the place of the old one.
            only: the ranges to update; ``None``: all elements.
        """
        assert bucket.grad is not None
        grad, copy = self._gradient(bucket), self._parameter_copy(bucket)
        ranges = self._ranges_of(bucket, hyperparameters)
        into = self._writable_double_buffer(bucket) if aside else None
        old, new = bucket.updated(bucket.buffers), None if into is None else bucket.updated(into)
        self._shared.guard.before_write(new or old)
        wait = bucket.kernel.order(old, grad, ranges, into=new, low=copy.values, only=only)
        self._updates.append(QueuedUpdate(bucket, copy, wait, bucket.grad, into, ends_with, sends))
        # After the request, the norm is known soon, and then the loop waits for each bucket.
        if len(self._updates) > (MAX_QUEUED if ends_with is None and self._shared.request is None else LEFT):
            self.finish(but=LEFT)

    def begin_average(self, bucket: Bucket, hyperparameters: StepHyperparameters) -> None:
        """The same with phase one of an update of matrices: of the momentum (:mod:`gptpar.offload.matrix_phases`)."""
        assert bucket.matrix_kernel is not None and bucket.grad is not None and bucket.momenta is not None
        self._shared.advance(bucket, What.AVERAGE_BEGUN)
        grad, copy = self._gradient(bucket), self._transfers.h2d_copy(*bucket.momenta)
        (momentum,) = bucket.buffers.states
        self._shared.guard.before_write([momentum])
        wait = bucket.matrix_kernel.order_average(momentum, grad, self._ranges_of(bucket, hyperparameters), copy.values)
        self._updates.append(QueuedUpdate(bucket, copy, wait, bucket.grad, None, What.AVERAGED, sends=True))
        if len(self._updates) > 1:
            self.finish(but=1)

    def finish(self, but: int = 0) -> None:
        """Wait for the kernel's updates, but for the latest ``but`` ones, and send their results, oldest first."""
        updates = [self._updates.popleft() for _ in range(len(self._updates) - but)]
        if self._shared.request is None:  # once the latest is done, nothing waits for the others
            ends = [update.wait() for update in reversed(updates)]
            for update, done in zip(updates, reversed(ends), strict=True):
                self._finish(update, done)
        else:  # the loop may wait for each
            for update in updates:
                self._finish(update, update.wait())

    def _finish(self, update: QueuedUpdate, done: Done) -> None:
        bucket = update.bucket
        self._shared.latest_updates.append((bucket.unit, done.begin, done.end))
        self._shared.busy_s += done.end - done.begin
        self._shared.record(What.KERNEL_DONE, bucket)
        if update.sends:
            self.send(bucket, update.copy)
        if update.ends_with is None:
            update.read.release()
        elif update.ends_with is What.AVERAGED:
            bucket.forget_gradient()
            with self._shared.changed:
                self._shared.advance(bucket, What.AVERAGED)
                self._shared.changed.notify_all()
        else:
            self.end_step(bucket, update.ends_with, swaps=update.into is not None)

    def end_step(self, bucket: Bucket, how: What, *, swaps: bool) -> None:
        """End a bucket's step.

        Args:
            swaps: whether the new state is in the double buffer.
        """
        shared = self._shared
        if swaps:
            assert bucket.double_buffer is not None
            bucket.buffers, bucket.double_buffer = bucket.double_buffer, bucket.buffers
        bucket.forget_gradient()
        bucket.steps += how is not What.SKIPPED
        length = bucket.stop - bucket.start
        with shared.changed:
            shared.num_updated += length if how is not What.SKIPPED else 0
            shared.num_ahead += length if how is What.COMMITTED else 0
            shared.advance(bucket, how)
            bucket.due = False
            shared.changed.notify_all()

    def send_weights(self, bucket: Bucket) -> None:
        """Copy the master weights to the device as they are."""
        copy = self._parameter_copy(bucket)
        copy.values.copy_(bucket.buffers.weights)
        self.send(bucket, copy)

    def send(self, bucket: Bucket, copy: H2DCopy) -> None:
        """Begin to copy a bucket's new parameters to the device."""
        bucket.sent = copy.send()
        self._shared.record(What.SENT, bucket)

    def _parameter_copy(self, bucket: Bucket) -> H2DCopy:
        if bucket.own_copy is not None:
            return bucket.own_copy
        return self._transfers.h2d_copy(bucket.parameters)

    def _gradient(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's gradient in host memory; what the kernel still reads may have to leave the ring first."""
        assert bucket.grad is not None
        while not bucket.grad.begin(urgent=True) and self._updates:
            self.finish(but=len(self._updates) - 1)
        self._shared.record(What.ARRIVED, bucket)
        return bucket.grad.tensor()

    def _ranges_of(self, bucket: Bucket, hyperparameters: StepHyperparameters) -> list[tuple[int, int, Any]]:
        """The kernel's argument: (start, stop, numbers of the group)."""
        groups = self._numbers.of(hyperparameters, bucket.steps + 1)
        return [(one.start, one.stop, groups[one.group]) for one in bucket.group_ranges]

    def _writable_double_buffer(self, bucket: Bucket) -> Buffers:
        """A bucket's double buffer, in other memory if a save needs what it holds and memory has room."""
        buffer = bucket.double_buffer
        assert buffer is not None and buffer.block is not None
        # The second part of a speculation with a partial gradient exchanges nothing: the first part has done so.
        other = self._shared.guard.exchange(buffer.block)
        bucket.double_buffer = buffer if other is None else buffer.in_other(other)
        return bucket.double_buffer
