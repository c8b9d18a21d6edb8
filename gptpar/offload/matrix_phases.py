"""The CPU optimizer's two phases of buckets whose update is one of matrices (Muon).

Phase one updates a bucket's momentum in the updating thread, and sends the Nesterov momentum to the device. In
:meth:`~gptpar.engine.master_optimizer.MasterOptimizer.step` the training loop waits for that, orthogonalizes the
matrices, and submits the directions. Phase two is an ordinary update of the bucket with its direction as gradient.

The two never wait for each other in a circle. In phase one the thread waits for nothing but gradients and the memory
that the loop gives for a unit's momenta. It takes the buckets that have memory, and finishes them before it waits. The
loop gives this memory before it waits for the unit's momenta, so what it waits for is always done next. In phase two
the thread waits for directions. By then all momenta are there, and the loop needs nothing more of the thread to submit
the rest. Other processes' loops, with which the loop exchanges matrices, wait for their own threads likewise.

These buckets do not speculate. The clipping factor is a factor of the gradient's share in the momentum, and what is
orthogonalized depends on it in all elements of a matrix: a speculation that turns out wrong would cost the assembly and
the orthogonalization once more. Nor could the loop orthogonalize anything before the backward pass has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gptpar.offload.bucket_state import BucketState
from gptpar.offload.buckets import Bucket
from gptpar.offload.events import What
from gptpar.offload.kernel_queue import QueuedUpdate
from gptpar.offload.step_request import StepHyperparameters
from gptpar.offload.updating_thread import UpdatingThread


class MatrixPhases(UpdatingThread):
    """An updating thread with buckets of both kinds; the training loop calls the methods without underscore."""

    def __init__(self, buckets: Sequence[Bucket], **rest: Any):
        super().__init__(buckets, **rest)
        self._of_unit: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            self._of_unit.setdefault(bucket.unit, []).append(bucket)

    def expect_momenta(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        """See :meth:`gptpar.engine.subscriber.Subscriber.expect_momenta`."""
        free = self._transfers.now()
        with self._changed:
            for bucket in self._matrix_buckets(unit):
                bucket.momenta = memory(bucket.start, bucket.stop), free
            self._changed.notify_all()

    def wait_for_momenta(self, unit: str) -> None:
        """See :meth:`gptpar.engine.subscriber.Subscriber.wait_for_momenta`."""
        buckets = self._matrix_buckets(unit)
        with self._changed:
            self._until(lambda: all(one.state is BucketState.AVERAGED or not one.due for one in buckets))
        self._raise()
        for bucket in buckets:
            sent, bucket.sent = bucket.sent, None
            if sent is not None:
                sent(False)

    def submit_directions(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        """See :meth:`gptpar.engine.subscriber.Subscriber.submit_directions`."""
        with self._changed:
            for bucket in self._matrix_buckets(unit):
                if bucket.due:  # not where the step is skipped
                    bucket.take(self._transfers.fetch(memory(bucket.start, bucket.stop), bucket.own_staging))
                    self._advance(bucket, What.DIRECTED)
            self._changed.notify_all()
        self._transfers.hold_back()

    def _matrix_buckets(self, unit: str) -> list[Bucket]:
        return [bucket for bucket in self._of_unit[unit] if bucket.matrix_kernel is not None]

    def _average(self, hyperparameters: StepHyperparameters, without: frozenset[str]) -> None:
        left = [one for one in self._buckets if one.matrix_kernel is not None and one.unit not in without]
        while left:
            bucket = next((one for one in left if one.momenta is not None), None)
            if bucket is None:
                self._finish_updates()
                self._wait_until(lambda: any(one.momenta is not None for one in left))
                continue
            left.remove(bucket)
            for coming in (bucket, *left[:1]):
                assert coming.grad is not None
                coming.grad.begin(urgent=True)
            self._begin_average(bucket, hyperparameters)
        self._finish_updates()

    def _begin_average(self, bucket: Bucket, hyperparameters: StepHyperparameters) -> None:
        assert bucket.matrix_kernel is not None and bucket.grad is not None and bucket.momenta is not None
        self._advance(bucket, What.AVERAGE_BEGUN)
        grad, copy = self._gradient(bucket), self._transfers.h2d_copy(*bucket.momenta)
        (momentum,) = bucket.buffers.states
        self.guard.before_write([momentum])
        wait = bucket.matrix_kernel.order_average(momentum, grad, self._ranges_of(bucket, hyperparameters), copy.values)
        self._at_work.add(QueuedUpdate(bucket, copy, wait, bucket.grad, None, What.AVERAGED, sends=True))
        if len(self._at_work) > 1:
            self._finish_updates(but=1)

    def _end_average(self, bucket: Bucket) -> None:
        bucket.forget_gradient()
        with self._changed:
            self._advance(bucket, What.AVERAGED)
            self._changed.notify_all()

    def _await_direction(self, bucket: Bucket) -> None:
        if bucket.matrix_kernel is not None:
            self._wait_until(lambda: bucket.state is BucketState.DIRECTED)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """The thread waits for the loop.

        Raises:
            RuntimeError: the loop has closed the optimizer amid a step.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closing or done())
            if not done():
                raise RuntimeError("the CPU optimizer was closed amid a step: the training loop had failed")

    def _until(self, done: Callable[[], bool]) -> None:
        """The loop waits, with the lock, until something is done, or the thread has failed."""
        self._changed.wait_for(lambda: self._failure is not None or done())

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
