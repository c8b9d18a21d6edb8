"""The CPU optimizer's thread: passes gradients from D2H copies to the kernel, copies results back, and backs off.

The kernel works on one bucket while Python sends the previous bucket's parameters and prepares the next bucket.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from gptpar.offload.back_off import BackOff
from gptpar.offload.bucket_state import HOLDS_SPECULATION, SPECULATED_WITH_FINAL, BucketState, event_of_step
from gptpar.offload.buckets import Bucket, Buffers
from gptpar.offload.events import EventLog, What
from gptpar.offload.kernel_queue import MAX_QUEUED, KernelQueue, QueuedUpdate
from gptpar.offload.next_action import Action, begin_copies, late_partials, next_action, next_arrival, speculable
from gptpar.offload.step_request import KernelNumbers, StepHyperparameters, StepRequest
from gptpar.offload.transfers import DeviceEvent, H2DCopy, Transfers
from gptpar.optim.elementwise import Done, HostKernel
from gptpar.system.state_guard import StateGuard

POLL_SECONDS = 2e-4

NUM_LATEST_UPDATES = 1 << 14
"""Number of updates whose times are kept: several steps of the largest models."""


class UpdatingThread:
    """The thread's half of a :class:`~gptpar.offload.host_optimizer.HostOptimizer`.

    Both halves share the buckets under one lock, ``_changed``. The training loop submits gradients and requests steps.
    After a request only the thread changes a bucket's state, and the loop waits until the bucket is no longer ``due``.
    Until then the memory of a submitted gradient must not change. Who writes what:

    ================================  ===============================  ========================================
    a bucket's state, grad, newer     loop and thread                  under the lock; while due: the thread
    a bucket's due                    loop sets it, thread clears it   under the lock
    a bucket's buffers, steps         thread                           while it is due, or speculates
    a bucket's sent                   thread sets it, loop clears it   the loop waits for "not due" before
    ``num_updated``, ``num_ahead``    thread                           under the lock
    ``_request``, ``_expected``       loop; thread clears the former   under the lock
    ``_back_off``                     thread                           the loop reads it without the lock
    ``_holds``, ``_keeps``            loop                             under the lock
    ``_taking_back``                  loop sets it, thread clears it   under the lock
    ================================  ===============================  ========================================

    Args:
        buckets: in forward order.
        kernels: by parameter group.
        transfers: copies between host and device.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        cores: the only ones on which the thread, and the kernel's threads that it starts, may run.
        log: is told what happens to each bucket.

    Attributes:
        busy_s: time in which the kernel worked.
        latest_updates: unit, begin and end (:func:`time.monotonic`) of the latest updates.
        num_redone: number of steps in which a speculation was wrong.
        num_updated: number of elements that were updated, over all steps.
        num_ahead: how many of these were committed from a speculation; both numbers change together.
        guard: is asked before an update overwrites state, in place or in a double buffer, which a commit may have made
            of state that is being saved. Then the double buffer is exchanged for other memory, and an update in place
            goes to the double buffer, so that nothing has to be copied.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        kernels: Sequence[HostKernel],
        transfers: Transfers,
        clip_grad: float,
        cores: Sequence[int] | None,
        log: EventLog | None,
    ):
        self._buckets, self._kernels, self._transfers, self._clip_grad = buckets, kernels, transfers, clip_grad
        self._cores, self.log = cores, log
        self.busy_s, self.num_redone, self.num_updated, self.num_ahead = 0.0, 0, 0, 0
        self.guard = StateGuard()
        self.guard.exchanged = self._exchanged_blocks
        self.latest_updates: deque[tuple[str, float, float]] = deque(maxlen=NUM_LATEST_UPDATES)
        self._request: StepRequest | None = None
        self._expected: StepHyperparameters | None = None
        self._back_off, self._holds = BackOff(), 0
        self._keeps = self._taking_back = False  # the last step's parameters until the next step
        self._at_work = KernelQueue()
        self._numbers = KernelNumbers(kernels)
        self._missed: tuple[int, ...] = ()
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gptpar-cpu-adam", daemon=True)

    def _run(self) -> None:
        try:
            if self._cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)  # for this thread; the kernel's threads, which it starts, inherit
            self._transfers.enter_thread()
            while self._do_next():
                pass
        except BaseException as error:  # the training loop raises it when it waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _do_next(self) -> bool:
        """Wait for the next action, and do it; returns whether to go on."""
        with self._changed:
            action, bucket = self._wait_for_action()
            request, expected = self._request, self._expected_now()
            if bucket is not None:  # under the lock: the loop may submit another gradient at any time
                self._advance(bucket, What.SPECULATION_BEGUN)
                bucket.speculated_with, partial = expected, bucket.partial
        if action is Action.SPECULATE:
            assert bucket is not None and expected is not None
            # With a partial gradient, update the closed ranges alone, and keep the new parameters in host memory: the
            # training loop may still compute with the old ones.
            closed = None if partial is None else partial.closed
            self._begin(bucket, expected, None, aside=True, only=closed, sends=partial is None)
        elif action is Action.TAKE_STEP:
            assert request is not None
            self._take_step(request)
        elif action is Action.FINISH_UPDATE:
            self._finish_updates()
        elif action is Action.TAKE_BACK:
            self._take_back()
        return action is not Action.END

    def _wait_for_action(self) -> tuple[Action, Bucket | None]:
        """Wait until there is an action, and return it with its bucket; the caller holds the lock."""
        while True:
            request = self._request
            candidates = self._candidates() if self._expected_now() is not None else []
            step_known = request is not None and (not candidates or request.norm.known())
            ending = self._closing and request is None
            on_its_way = not (step_known or ending) and begin_copies(candidates)
            action, bucket = next_action(
                candidates,
                step_known=step_known,
                on_its_way=on_its_way,
                at_work=bool(self._at_work),
                taking_back=self._taking_back,
                ending=ending,
            )
            if action is not Action.WAIT and action is not Action.WAKE:
                return action, bucket
            self._wait(next_arrival(candidates), wakes=action is Action.WAKE, polls=bool(candidates))

    def _wait(self, point: DeviceEvent | None, *, wakes: bool, polls: bool) -> None:
        """Wait, with the lock, until there may be another action.

        While gradients are under way, nobody has to wake the thread: it sleeps in the driver, without Python's lock.
        Looking for them every 0.2 ms, it interrupted the backward pass so often that each layer took twice as long.

        Args:
            point: of the device's work, to wait for; gradients submitted meanwhile come later.
            wakes: whether to wake the kernel's threads.
            polls: whether to look again after ``POLL_SECONDS`` if there is no point.
        """
        if point is None and not wakes:
            self._changed.wait(POLL_SECONDS if polls else None)
            return
        self._changed.release()
        try:
            if wakes:
                for kernel in dict.fromkeys(self._kernels):
                    kernel.wake()
            if point is not None:
                point.synchronize()
        finally:
            self._changed.acquire()

    def _expected_now(self) -> StepHyperparameters | None:
        """The coming step's hyperparameters if nothing is clipped; ``None``: they are not known yet."""
        return self._expected if self._request is None else self._request.unclipped

    def _candidates(self) -> list[Bucket]:
        for bucket in late_partials(self._buckets):
            bucket.use_newer()
            bucket.partial = None
            self._advance(bucket, What.PARTIAL_DROPPED)
        return [] if self._back_off.steps or self._holds or self._keeps else speculable(self._buckets)

    def _take_back(self) -> None:
        """Undo the speculation: the device's parameters get the last step's values, and the gradients stay."""
        for bucket in self._buckets:
            if bucket.state in (BucketState.SPECULATED, BucketState.STALE):
                self._send_weights(bucket)
        with self._changed:
            for bucket in self._buckets:
                if bucket.state in SPECULATED_WITH_FINAL:
                    bucket.use_newer()
                    bucket.partial = bucket.speculated_with = None
                    self._advance(bucket, What.TAKEN_BACK)
            self._taking_back = False
            self._changed.notify_all()

    def _take_step(self, request: StepRequest) -> None:
        hyperparameters = request.clipped(self._clip_grad)
        redone, ahead = False, self.num_ahead
        self._finish_updates()
        for bucket in self._buckets:
            bucket.use_newer()
        if hyperparameters is not None:
            self._average(hyperparameters, request.without)
        events = ((bucket, self._event_of_step(bucket, hyperparameters, request.without)) for bucket in self._buckets)
        for this, following in pairwise(chain(events, [None])):
            assert this is not None
            _begin_copy_if_needed(*this)
            if following is not None:
                _begin_copy_if_needed(*following)
            redone |= self._follow(*this, hyperparameters)
        self._finish_updates()
        if self.log is not None:
            self.log.record(What.STEP_TAKEN)
        self.num_redone += redone
        self._back_off.after_step(wrong=redone, right=self.num_ahead > ahead)
        with self._changed:
            if self._request is request:  # the loop may have requested the next step since the last bucket was done
                self._request = None
            self._changed.notify_all()

    def _event_of_step(
        self, bucket: Bucket, hyperparameters: StepHyperparameters | None, without: frozenset[str]
    ) -> What:
        if hyperparameters is None or bucket.unit in without:
            return What.SKIPPED
        if bucket.speculated_with is None:
            return What.UPDATE_BEGUN
        has_open_ranges = bucket.partial is not None and len(bucket.partial.to_complete()) > 0
        return event_of_step(bucket.state, bucket.speculated_with == hyperparameters, has_open_ranges)

    def _follow(self, bucket: Bucket, event: What, hyperparameters: StepHyperparameters | None) -> bool:
        """Do the bucket's part of the step, or begin to; returns whether a speculation was wrong."""
        before = bucket.state
        if event is What.SKIPPED or event is What.COMMITTED:
            if event is What.SKIPPED and before in HOLDS_SPECULATION:
                self._send_weights(bucket)
            elif before is BucketState.SPECULATED_AND_FINAL:  # the speculated parameters wait in host memory
                assert bucket.own_copy is not None
                self._send(bucket, bucket.own_copy)
            self._end_step(bucket, event, swaps=event is What.COMMITTED)
            return False
        assert hyperparameters is not None
        self._await_direction(bucket)
        self._advance(bucket, event)
        if event is What.COMPLETION_BEGUN:
            assert bucket.partial is not None
            self._begin(bucket, hyperparameters, What.COMMITTED, aside=True, only=bucket.partial.to_complete())
            return False
        block = bucket.buffers.block
        aside = bucket.double_buffer is not None and block is not None and self.guard.needs(block)
        self._begin(bucket, hyperparameters, What.UPDATED, aside=aside)
        return before in HOLDS_SPECULATION

    def _begin(
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
            ends_with: see :class:`~gptpar.offload.kernel_queue.QueuedUpdate`.
            aside: whether the new state goes to the double buffer; else it takes the place of the old one.
            only: the ranges to update; ``None``: all elements.
            sends: see :class:`~gptpar.offload.kernel_queue.QueuedUpdate`.
        """
        assert bucket.grad is not None
        grad, copy = self._gradient(bucket), self._parameter_copy(bucket)
        ranges = self._ranges_of(bucket, hyperparameters)
        into = self._writable_double_buffer(bucket) if aside else None
        old, new = bucket.updated(bucket.buffers), None if into is None else bucket.updated(into)
        self.guard.before_write(new or old)
        wait = bucket.kernel.order(old, grad, ranges, into=new, low=copy.values, only=only)
        self._at_work.add(QueuedUpdate(bucket, copy, wait, bucket.grad, into, ends_with, sends))
        # After the request, the norm is known soon, and then the loop waits for each bucket.
        if len(self._at_work) > (MAX_QUEUED if ends_with is None and self._request is None else 1):
            self._finish_updates(but=1)

    def _gradient(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's gradient in host memory; what the kernel still reads may have to leave the ring first."""
        assert bucket.grad is not None
        if not bucket.grad.begin(urgent=True):
            self._finish_updates()
        self._record(What.ARRIVED, bucket)
        return bucket.grad.tensor()

    def _writable_double_buffer(self, bucket: Bucket) -> Buffers:
        """A bucket's double buffer, in other memory if a save needs what it holds and memory has room."""
        buffer = bucket.double_buffer
        assert buffer is not None and buffer.block is not None
        # The second half of a partial gradient finds nothing to exchange: the first half did.
        other = self.guard.exchange(buffer.block)
        bucket.double_buffer = buffer if other is None else buffer.in_other(other)
        return bucket.double_buffer

    def _exchanged_blocks(self) -> Iterator[torch.Tensor]:
        """The memory of valid state that a commit makes a double buffer, so that it is never updated in place."""
        for bucket in self._buckets:
            if bucket.double_buffer is not None and bucket.buffers.block is not None:
                yield bucket.buffers.block

    def miss(self, steps: tuple[int, ...]) -> None:
        """Let the coming steps' number be smaller for some groups; ``steps``: by how much, for each group."""
        self._missed = steps

    # The first phase of updates of matrices, and the wait for the second one: see gptpar.offload.matrix_phases.

    def _average(self, hyperparameters: StepHyperparameters, without: frozenset[str]) -> None: ...

    def _end_average(self, bucket: Bucket) -> None: ...

    def _await_direction(self, bucket: Bucket) -> None: ...

    def _ranges_of(self, bucket: Bucket, hyperparameters: StepHyperparameters) -> list[tuple[int, int, Any]]:
        """The kernel's argument: (start, stop, numbers of the group)."""
        groups = self._numbers.of(hyperparameters, bucket.steps + 1)
        return [(one.start, one.stop, groups[one.group]) for one in bucket.group_ranges]

    def _finish_updates(self, but: int = 0) -> None:
        """Wait for the kernel's updates, but for the latest ``but`` ones, and send their results."""
        for work, done in self._at_work.take_done(but):
            self._finish(work, done)

    def _finish(self, work: QueuedUpdate, done: Done) -> None:
        bucket = work.bucket
        self.latest_updates.append((bucket.unit, done.begin, done.end))
        self.busy_s += done.end - done.begin
        self._record(What.KERNEL_DONE, bucket)
        if work.sends:
            self._send(bucket, work.copy)
        if work.ends_with is None:
            work.read.release()
        elif work.ends_with is What.AVERAGED:
            self._end_average(bucket)
        else:
            self._end_step(bucket, work.ends_with, swaps=work.into is not None)

    def _end_step(self, bucket: Bucket, how: What, *, swaps: bool) -> None:
        """End a bucket's step.

        Args:
            swaps: whether the new state is in the double buffer.
        """
        if swaps:
            assert bucket.double_buffer is not None
            bucket.buffers, bucket.double_buffer = bucket.double_buffer, bucket.buffers
        bucket.forget_gradient()
        bucket.steps += how is not What.SKIPPED
        length = bucket.stop - bucket.start
        with self._changed:
            self.num_updated += length if how is not What.SKIPPED else 0
            self.num_ahead += length if how is What.COMMITTED else 0
            self._advance(bucket, how)
            bucket.due = False
            self._changed.notify_all()

    def _send_weights(self, bucket: Bucket) -> None:
        """Copy the master weights to the device as they are."""
        copy = self._parameter_copy(bucket)
        copy.values.copy_(bucket.buffers.weights)
        self._send(bucket, copy)

    def _send(self, bucket: Bucket, copy: H2DCopy) -> None:
        bucket.sent = copy.send()
        self._record(What.SENT, bucket)

    def _parameter_copy(self, bucket: Bucket) -> H2DCopy:
        if bucket.own_copy is not None:
            return bucket.own_copy
        return self._transfers.h2d_copy(bucket.parameters)

    def _advance(self, bucket: Bucket, what: What) -> None:
        """Change a bucket's state. The caller holds the lock, or the bucket is due and belongs to the thread alone."""
        bucket.advance(what)
        if self.log is not None:
            self.log.record(what, bucket.unit, bucket.start, bucket.stop)

    def _record(self, what: What, bucket: Bucket) -> None:
        if self.log is not None:
            self.log.record(what, bucket.unit, bucket.start, bucket.stop)


def _begin_copy_if_needed(bucket: Bucket, event: What) -> None:
    """Begin the D2H copy of a gradient that the step will read; it may take a reserved slot of the ring."""
    if bucket.grad is not None and (event is What.UPDATE_BEGUN or event is What.COMPLETION_BEGUN):
        bucket.grad.begin(urgent=True)
