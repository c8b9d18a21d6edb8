"""What the training loop and the CPU optimizer's thread share: the buckets, the requested step, and one lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from gptpar.offload.bucket_state import TRANSITIONS, ForbiddenEvent
from gptpar.offload.buckets import Bucket
from gptpar.offload.events import EventLog, What
from gptpar.offload.step_request import StepHyperparameters, StepRequest
from gptpar.offload.transfers import Transfers
from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.system.state_guard import StateGuard

NUM_LATEST_UPDATES = 1 << 14
"""Number of updates whose times are kept: several steps of the largest models."""


class SharedState:
    """The CPU optimizer's state, with one lock, :attr:`changed`.

    The training loop (:class:`~gptpar.offload.host_optimizer.HostOptimizer`) submits gradients and requests steps.
    After a request only the thread (:class:`~gptpar.offload.updating_thread.UpdatingThread`, and its
    :class:`~gptpar.offload.kernel_queue.KernelQueue`) changes a bucket's state, and the loop waits until the bucket is
    no longer ``due``. Until then the memory of a submitted gradient must not change. Who writes what:

    ======================================  ===============================  ========================================
    a bucket's state, grad, newer, partial  loop and thread                  under the lock; while due: the thread
    a bucket's due                          loop sets it, thread clears it   under the lock
    a bucket's momenta                      loop; thread clears it           the loop sets and clears it under the lock
    a bucket's buffers, speculated_with     thread                           while it is due, or speculates
    a bucket's steps                        thread; loop at a load           while it is due; no step is requested
    a bucket's group_ranges                 loop                             while no step is requested
    a bucket's sent                         thread sets it, loop clears it   the loop waits before: for "not due", or
                                                                             for momenta that are there
    ``num_updated``, ``num_ahead``          thread                           under the lock
    ``request``, ``expected``               loop; thread clears the former   under the lock
    ``holds``, ``keeps``, ``closing``       loop                             under the lock
    ``taking_back``                         loop sets it, thread clears it   under the lock
    ``failure``                             thread, at its end               under the lock
    ``backs_off``, ``num_redone``,          thread                           the loop reads them without the lock
    ``busy_s``, ``latest_updates``
    ======================================  ===============================  ========================================

    Args:
        buckets: in forward order.
        transfers: copies between host and device.
        log: records what happens to each bucket.

    Attributes:
        changed: is notified when any of this has changed.
        guard: is asked before an update overwrites state. If a save still reads it, the double buffer gets other
            memory, and an in-place update goes to the double buffer, so that nothing is copied.
        of_unit: unit -> its buckets.
        request: the step to take; ``None``: none is requested, or it is done.
        expected: the coming step's probable hyperparameters, before it is requested.
        holds: how many contexts forbid that speculation begins.
        keeps: whether the device keeps the last step's parameters until the next step is requested.
        taking_back: whether the loop waits for these values.
        closing: whether the thread is to end once no step is requested.
        failure: the error that ended the thread.
        backs_off: whether the coming step does not speculate, because the last one had other numbers than expected.
        num_updated: number of elements that were updated, over all steps.
        num_ahead: how many of these were committed from a speculation; both numbers change together.
        num_redone: number of steps in which a speculation was wrong.
        busy_s: time in which the kernel worked.
        latest_updates: unit, begin and end (:func:`time.monotonic`) of the latest updates.
    """

    def __init__(self, buckets: Sequence[Bucket], transfers: Transfers, log: EventLog | None):
        self.buckets, self.transfers, self.log = buckets, transfers, log
        self.of_unit: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            self.of_unit.setdefault(bucket.unit, []).append(bucket)
        self.changed = threading.Condition()
        self.guard = StateGuard()
        self.guard.exchanged = self._exchanged_blocks
        self.request: StepRequest | None = None
        self.expected: StepHyperparameters | None = None
        self.holds, self.keeps, self.taking_back, self.closing = 0, False, False, False
        self.failure: BaseException | None = None
        self.backs_off = False
        self.num_updated, self.num_ahead, self.num_redone, self.busy_s = 0, 0, 0, 0.0
        self.latest_updates: deque[tuple[str, float, float]] = deque(maxlen=NUM_LATEST_UPDATES)

    def regroup(self, partitions: Sequence[OffloadedPartition]) -> None:
        """Give buckets the groups that the partitions have now, between two steps; those of one kernel keep it."""
        for part in partitions:
            for bucket in self.of_unit[part.unit]:
                bucket.group_ranges = part.between(bucket.start, bucket.stop).group_ranges

    def parts(self, unit: str, grad: torch.Tensor) -> list[tuple[Bucket, torch.Tensor]]:
        """A unit's buckets, and their parts of its gradient.

        It is one call of torch for all parts: each call gives Python's lock away, and waits for it again.

        Raises:
            ForbiddenEvent: the unit's last step is not done.
        """
        buckets = self.of_unit[unit]
        for bucket in buckets:
            if bucket.due:
                raise ForbiddenEvent(What.SUBMITTED, unit, bucket.start, bucket.stop, "a step that is not done")
        cuts = sorted({0, *[b.start for b in buckets], *[b.stop for b in buckets]})
        parts = dict(zip(cuts, grad.tensor_split(cuts[1:]), strict=True))
        return [(bucket, parts[bucket.start]) for bucket in buckets]

    def matrix_buckets(self, unit: str) -> list[Bucket]:
        """A unit's buckets whose update is one of matrices."""
        return [bucket for bucket in self.of_unit[unit] if bucket.matrix_kernel is not None]

    @property
    def forbids_speculation(self) -> bool:
        """Whether no speculation may begin now."""
        return self.backs_off or self.holds > 0 or self.keeps

    def note_expectation(self, expected: StepHyperparameters | None, taken: StepHyperparameters | None) -> None:
        """Back off after a step whose hyperparameters differ from the expected ones: the next step does not speculate.

        Clipped steps come in runs. A step that has not speculated counts, too: the pause ends as soon as a speculation
        would have been right.

        Args:
            expected: before the step was requested; ``None``: nothing was.
            taken: of the step; ``None``: it was skipped.
        """
        if expected is not None and taken is not None:
            self.backs_off = taken != expected

    def advance(self, bucket: Bucket, what: What) -> None:
        """Change a bucket's state. The caller holds the lock, or the bucket is due and belongs to the thread alone.

        Raises:
            ForbiddenEvent: the state does not allow the event.
        """
        following = TRANSITIONS.get((bucket.state, what))
        if following is None:
            raise ForbiddenEvent(what, bucket.unit, bucket.start, bucket.stop, bucket.state)
        bucket.state = following
        if self.log is not None:
            self.record(what, bucket)

    def record(self, what: What, bucket: Bucket | None = None) -> None:
        """Log an event of a bucket; ``None``: of the whole step."""
        if self.log is not None and bucket is not None:
            self.log.record(what, bucket.unit, bucket.start, bucket.stop)
        elif self.log is not None:
            self.log.record(what)

    def loop_waits(self, done: Callable[[], bool]) -> None:
        """The loop waits, without the lock, until the thread has done something.

        Raises:
            BaseException: the error that ended the thread.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or done())
        if self.failure is not None:
            raise self.failure

    def thread_waits(self, done: Callable[[], bool]) -> None:
        """The thread waits, without the lock, until the loop has done something.

        Raises:
            RuntimeError: the loop has closed the optimizer amid a step.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.closing or done())
            if not done():
                raise RuntimeError("the CPU optimizer was closed amid a step: the training loop had failed")

    def wait_for_step(self) -> None:
        """Return when the last step's state is in host memory; any thread may call it."""
        self.loop_waits(lambda: self.request is None and not any(bucket.due for bucket in self.buckets))

    def _exchanged_blocks(self) -> Iterator[torch.Tensor]:
        """The state's memory in buckets with a double buffer; while a save reads it, updates go to that buffer."""
        for bucket in self.buckets:
            if bucket.double_buffer is not None and bucket.buffers.block is not None:
                yield bucket.buffers.block
