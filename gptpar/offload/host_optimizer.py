"""An elementwise optimizer over elements whose master weights and state live in host memory.

A thread of its own (:mod:`~gptpar.offload.updating_thread`) updates them in buckets while the device works: in the
order of the forward pass, in which each layer waits for its own buckets only. Two ways to win time, with the same
numbers:

- After the backward pass the global gradient norm is known, and with it the factor of clipping: update in place.
- Before that, where host memory holds a double buffer: assume that nothing will be clipped, and write the new values
  there ("speculate"). If that turns out right, the buffers change places ("commit"); else the step is computed again
  from the old values, which nothing has touched. After that the optimizer backs off for some steps. Of a partial
  gradient, the elements that will change are left out until it is final.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from gptpar.offload.bucket_state import HAS_FINAL, BucketState, ForbiddenEvent
from gptpar.offload.buckets import Bucket, add_double_buffers, buckets_of, bytes_of, parts_of
from gptpar.offload.events import EventLog, What
from gptpar.offload.index_ranges import between
from gptpar.offload.step_request import StepHyperparameters, StepRequest
from gptpar.offload.switch_interval import SWITCH_INTERVAL
from gptpar.offload.transfers import Transfers
from gptpar.offload.updating_thread import UpdatingThread
from gptpar.optim.elementwise import HostKernel, Hyperparameters
from gptpar.optim.spans import OffloadedPartition

SWITCH_SECONDS = 5e-5
"""How long a thread may keep Python's lock. The default is 5 ms: so long the updating thread would wait after each
bucket while the training loop launches work."""

CLOSE_SECONDS = 60.0


class HostOptimizer(UpdatingThread):
    """What the training loop calls: a :class:`~gptpar.engine.subscriber.Subscriber` of the engine.

    While it lives, Python switches between threads more often.

    Args:
        partitions: each unit's offloaded range, in forward order.
        parameters: unit -> the model's parameters on the device, as long as the unit's offloaded range.
        dtype: of master weights and optimizer state.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        kernel: updates buckets; its states are the optimizer's.
        transfers: copies between host and device.
        folder: on a disk where the state is to be kept.
        cores: the only ones on which the thread, and the kernel's threads that it starts, may run.
        speculated_elements: see :meth:`add_double_buffers`.
        partial_unit: the unit whose partial gradients may be submitted; only its buckets with a double buffer use them.
        log: is told what happens to each bucket.

    Attributes:
        waited_s: time that :meth:`wait` has cost since the start.
        num_elements: that one step updates.
        partial_unit: the unit whose partial gradients are of use, if any are.
    """

    def __init__(
        self,
        partitions: Sequence[OffloadedPartition],
        parameters: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        clip_grad: float,
        kernel: HostKernel,
        transfers: Transfers,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        speculated_elements: int = 0,
        partial_unit: str | None = None,
        log: EventLog | None = None,
    ):
        # Buckets first: the thread's half works on them. Double buffers before what partial gradients need, which only
        # buckets with a double buffer get. The thread starts last, when nothing is added any more.
        names = ("weights", *kernel.states)
        buckets = [
            b
            for partition in partitions
            for b in buckets_of(partition, parameters[partition.unit], names, dtype, folder)
        ]
        super().__init__(buckets, kernel=kernel, transfers=transfers, clip_grad=clip_grad, cores=cores, log=log)
        self._of_unit: dict[str, list[Bucket]] = {partition.unit: [] for partition in partitions}
        for bucket in buckets:
            self._of_unit[bucket.unit].append(bucket)
            bucket.own_slot = transfers.own_slot(bucket.parameters.nbytes)
        self.waited_s, self.num_elements = 0.0, sum(partition.length for partition in partitions)
        self.partial_unit: str | None = None
        self._open_ranges: dict[str, np.ndarray] = {}
        self.add_double_buffers(speculated_elements)
        if partial_unit is not None:
            self._prepare_partial(partial_unit)
        SWITCH_INTERVAL.shorten(SWITCH_SECONDS)
        self._thread.start()

    def _prepare_partial(self, unit: str) -> None:
        """Give the unit's buckets that have a double buffer what partial gradients need."""
        for bucket in self._of_unit[unit]:
            if bucket.double_buffer is not None:
                bucket.own_copy = self._transfers.keeping(bucket.parameters)
                bucket.own_slot = self._transfers.reserve_slot()
                self.partial_unit = unit
                self._record(What.PREPARED, bucket)

    def add_double_buffers(self, elements: int) -> None:
        """Allow speculation for some elements: the last ones of the model."""
        add_double_buffers(self._buckets, elements)

    # A step.

    def expect_step(self, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> None:
        """What the coming step will probably be, so that it may be begun during the backward pass."""
        with self._changed:
            self._expected = StepHyperparameters(hyperparameters, loss_scale)
            self._changed.notify_all()

    def expect_open_ranges(self, unit: str, ranges: np.ndarray) -> None:
        """In which ranges the coming step's gradient of a unit will change after it is submitted in part."""
        self._open_ranges[unit] = ranges

    def submit_gradient(self, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        """A unit's gradient is final on the device; the memory must stay as it is until the unit's next gradient.

        A second one before the step replaces the first.

        Args:
            formed: how many of the gradient's elements, the first ones, are formed, where it is partial. They may still
                change in the ranges that :meth:`expect_open_ranges` named. The step may be speculated with them. More
                of the gradient may be submitted, and all of it when it is final; the memory may be the same.

        Raises:
            ForbiddenEvent: the unit's last step is not done.
        """
        with self._changed:
            open_ranges = self._open_ranges.pop(unit, None) if formed is None else self._open_ranges.get(unit)
            for bucket in self._of_unit[unit]:
                if bucket.due:
                    raise ForbiddenEvent(What.SUBMITTED, unit, bucket.start, bucket.stop, "a step that is not done")
                part = grad[bucket.start : bucket.stop]
                if formed is None:
                    bucket.take(self._transfers.fetch(part, bucket.own_slot))
                    self._advance(bucket, What.SUBMITTED)
                elif open_ranges is not None and self._takes_partial(bucket, formed):
                    its_open_ranges = between(open_ranges, bucket.start, bucket.stop) - bucket.start
                    bucket.take_partial(self._transfers.fetch(part), its_open_ranges)
                    self._advance(bucket, What.SUBMITTED_PARTIAL)
            self._changed.notify_all()
        self._transfers.hold_back()  # without the lock: what is waited for may need the thread

    def _takes_partial(self, bucket: Bucket, formed: int) -> bool:
        """Whether a partial gradient is of use here, and new."""
        is_formed = bucket.stop <= formed and bucket.state is BucketState.IDLE
        return is_formed and bucket.own_copy is not None and not self.backs_off

    def step(
        self,
        norm: torch.Tensor,
        hyperparameters: tuple[Hyperparameters, ...],
        loss_scale: float,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Request a step; the thread takes it.

        Args:
            norm: the whole model's gradient norm without the loss scale, on the device; not finite: nothing changes.
            hyperparameters: by group.
            without: units that stay as they are. All others must have been given a final gradient.

        Raises:
            ForbiddenEvent: one was not.
        """
        unclipped = StepHyperparameters(hyperparameters, loss_scale)
        self._announce(StepRequest(self._transfers.read_scalar(norm), unclipped, without))

    def cancel(self, *, wait: bool = True) -> None:
        """Forget the gradients of the coming step; parameters have the last step's values again.

        Args:
            wait: whether to return only when they have.
        """
        not_finite = self._transfers.read_scalar(torch.tensor(float("nan")))
        self._announce(StepRequest(not_finite, None, frozenset(self._of_unit)))
        if wait:
            self.finish()

    def _announce(self, request: StepRequest) -> None:
        with self._changed:
            for bucket in self._buckets:
                if bucket.state not in HAS_FINAL and bucket.unit not in request.without:
                    raise ForbiddenEvent(What.STEP_REQUESTED, bucket.unit, bucket.start, bucket.stop, bucket.state)
            for bucket in self._buckets:
                bucket.due = True
            if self.log is not None:
                self.log.record(What.STEP_REQUESTED)
            self._request, self._expected = request, None
            self._changed.notify_all()

    def wait(self, unit: str, *, block: bool = False) -> None:
        """Return when a unit's last step is done; what is put on the device afterwards finds the new parameters.

        Args:
            block: whether to return only when they are there, for readers on streams other than the current one.

        Raises:
            BaseException: what went wrong in the thread.
        """
        if self.log is not None:
            self.log.record(What.WAITED, unit)
        self._wait_for(self._of_unit.get(unit, ()), block)

    def finish(self) -> None:
        """Like :meth:`wait`, for everything."""
        self._wait_for(self._buckets)
        with self._changed:
            self._changed.wait_for(lambda: self._request is None or self._failure is not None)
        self._raise()

    def _wait_for(self, buckets: Sequence[Bucket], block: bool = False) -> None:
        started = time.perf_counter()
        with record_function("wait for the CPU optimizer"), self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not any(bucket.due for bucket in buckets))
        self.waited_s += time.perf_counter() - started
        self._raise()
        for bucket in buckets:
            sent, bucket.sent = bucket.sent, None
            if sent is not None:
                sent(block)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def backs_off(self) -> bool:
        """Whether nothing is speculated in the coming step, because that was wrong in a recent one."""
        return self._steps_to_back_off > 0

    # Between steps.

    def publish(self) -> None:
        """Copy all master weights to the device, after they were changed from outside."""
        self.finish()
        for bucket in self._buckets:
            self._send_weights(bucket)
        self.finish()

    def close(self) -> None:
        """End the thread, after a requested step, and give back what transfers have reserved.

        A thread that waits for a device which does not answer is left behind: it ends with the process.
        """
        with self._changed:
            closed, self._closing = self._closing, True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if not closed:
            SWITCH_INTERVAL.restore(SWITCH_SECONDS)
            if not self._thread.is_alive():
                self._transfers.close()

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted."""
        self.finish()
        return max(bucket.steps for bucket in self._buckets)

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        for unit in self._of_unit:
            self.set_steps(unit, count)

    def steps_of(self, unit: str) -> int:
        """A unit's updates so far, skipped ones and those without its gradient not counted."""
        self.finish()
        return self._of_unit[unit][0].steps

    def set_steps(self, unit: str, count: int) -> None:
        """Continue as if the unit had been updated ``count`` times."""
        self.finish()
        for bucket in self._of_unit[unit]:
            bucket.steps = count

    def parts(self, kind: str) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See :func:`parts_of <gptpar.offload.buckets.parts_of>`."""
        self.finish()
        yield from parts_of(self._buckets, kind)

    def square_of_weights(self) -> float:
        """Sum of squares of the master weights that this process counts."""
        self.finish()
        return sum(
            self._kernel.square(bucket.buffers.weights[start:stop])
            for bucket in self._buckets
            for start, stop in bucket.counted
        )

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Memory of master weights and optimizer state, and of their double buffers."""
        return bytes_of(self._buckets)

    @property
    def kernel(self) -> str:
        """What updates, in a few words."""
        return f"{self._kernel.isa}, {self._kernel.threads} thread(s)"
