"""The CPU optimizer's thread: speculates while gradients come, takes the steps that the training loop requests."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

from gptpar.engine.subscriber import HostGradientSums
from gptpar.offload.bucket_state import HOLDS_SPECULATION, SPECULATED_WITH_FINAL, BucketState, event_of_step
from gptpar.offload.buckets import Bucket
from gptpar.offload.events import What
from gptpar.offload.kernel_queue import KernelQueue
from gptpar.offload.matrix_phases import update_momenta
from gptpar.offload.next_action import Action, begin_copies, late_partials, next_action, next_arrival, speculable
from gptpar.offload.shared_state import SharedState
from gptpar.offload.step_request import StepHyperparameters, StepRequest
from gptpar.offload.transfers import DeviceEvent
from gptpar.system.switch_interval import SWITCH_INTERVAL

POLL_SECONDS = 2e-4

SWITCH_SECONDS = 1e-3
"""How long a thread may keep Python's lock. With the default of 5 ms, the updating thread would wait 5 ms after each
bucket while the training loop launches kernels; with 50 us, they would interrupt each other all the time."""

CLOSE_SECONDS = 60.0
EXIT_SECONDS = 10.0


class UpdatingThread(threading.Thread):
    """The thread's half of the CPU optimizer; :class:`~gptpar.offload.shared_state.SharedState` says what it may write.

    Args:
        queue: does the updates.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        cores: the only ones on which the thread, and the kernel's threads that it starts, may run.
    """

    def __init__(self, shared: SharedState, queue: KernelQueue, *, clip_grad: float, cores: Sequence[int] | None):
        super().__init__(name="gptpar-cpu-adam", daemon=True)
        self._shared, self._queue, self._clip_grad, self._cores = shared, queue, clip_grad, cores
        self._with_partial = [bucket for bucket in shared.buckets if bucket.own_copy is not None]

    def start(self) -> None:
        SWITCH_INTERVAL.shorten(SWITCH_SECONDS)
        super().start()
        self._at_exit = partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """See :meth:`HostOptimizer.close <gptpar.offload.host_optimizer.HostOptimizer.close>`.

        Args:
            patience: seconds after which a device counts as silent. Then the thread ends with the process.
        """
        shared = self._shared
        with shared.changed:
            closed, shared.closing = shared.closing, True
            shared.changed.notify_all()
        self.join(patience)
        if not closed:
            atexit.unregister(self._at_exit)
            SWITCH_INTERVAL.restore(SWITCH_SECONDS)
            if not self.is_alive():
                shared.transfers.close()

    def run(self) -> None:
        try:
            if self._cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)  # for this thread; the kernel's threads, which it starts, inherit
            self._shared.transfers.enter_thread()
            while self._do_next():
                pass
        except BaseException as error:  # the training loop raises it when it waits
            with self._shared.changed:
                self._shared.failure = error
                self._shared.changed.notify_all()

    def _do_next(self) -> bool:
        """Wait for the next action, and do it; returns whether to go on."""
        with self._shared.changed:
            action, bucket = self._wait_for_action()
            request, expected = self._shared.request, None
            if bucket is not None:  # under the lock: the loop may submit another gradient at any time
                self._shared.advance(bucket, What.SPECULATION_BEGUN)
                expected, early = self._expected_now(), bucket.partial
                bucket.speculated_with = expected
        if action is Action.SPECULATE:
            assert bucket is not None and expected is not None
            # With a partial gradient, update the closed ranges alone, and keep the new parameters in host memory: the
            # training loop may still compute with the old ones.
            closed = None if early is None else early.closed
            self._queue.begin(bucket, expected, None, aside=True, only=closed, sends=early is None)
        elif action is Action.TAKE_STEP:
            assert request is not None
            self._take_step(request)
        elif action is Action.FINISH_UPDATE:
            self._queue.finish()
        elif action is Action.TAKE_BACK:
            self._take_back()
        return action is not Action.END

    def _wait_for_action(self) -> tuple[Action, Bucket | None]:
        """Wait until there is an action, and return it with its bucket; the caller holds the lock."""
        while True:
            request = self._shared.request
            candidates: list[Bucket] = []
            if self._expected_now() is not None:
                if self._with_partial:
                    self._drop_late_partials()
                candidates = [] if self._shared.forbids_speculation else speculable(self._shared.buckets)
            step_known = request is not None and (not candidates or request.norm.known())
            ending = self._shared.closing and request is None
            on_its_way = not (step_known or ending) and begin_copies(candidates)
            action, bucket = next_action(
                candidates,
                step_known=step_known,
                on_its_way=on_its_way,
                at_work=bool(self._queue),
                taking_back=self._shared.taking_back,
                ending=ending,
            )
            if action is not Action.WAIT and action is not Action.WAKE:
                return action, bucket
            self._wait(next_arrival(candidates), wakes=action is Action.WAKE, polls=bool(candidates))

    def _wait(self, point: DeviceEvent | None, *, wakes: bool, polls: bool) -> None:
        """Wait, with the lock, until there may be another action.

        While gradients are under way, the thread sleeps in the driver, without Python's lock, and nobody has to wake
        it. When it looked for them every 0.2 ms, it interrupted the backward pass, and each layer took twice as long.

        Args:
            point: of the device's work, to wait for; gradients submitted meanwhile come later.
            wakes: whether to wake the kernel's threads.
            polls: whether to look again after ``POLL_SECONDS`` if there is no point.
        """
        if point is None and not wakes:
            self._shared.changed.wait(POLL_SECONDS if polls else None)
            return
        self._shared.changed.release()
        try:
            if wakes:
                self._queue.wake()
            if point is not None:
                point.synchronize()
        finally:
            self._shared.changed.acquire()

    def _expected_now(self) -> StepHyperparameters | None:
        """The coming step's hyperparameters if nothing is clipped; ``None``: they are not known yet."""
        return self._shared.expected if self._shared.request is None else self._shared.request.unclipped

    def _drop_late_partials(self) -> None:
        """Use the final gradients that came before their partial ones were used."""
        for bucket in late_partials(self._with_partial):
            bucket.use_newer()
            bucket.partial = None
            self._shared.advance(bucket, What.PARTIAL_DROPPED)

    def _take_back(self) -> None:
        """Undo the speculation: the device's parameters get the last step's values, and the gradients stay."""
        shared = self._shared
        for bucket in shared.buckets:
            if bucket.state in (BucketState.SPECULATED, BucketState.STALE):
                self._queue.send_weights(bucket)
        with shared.changed:
            for bucket in shared.buckets:
                if bucket.state in SPECULATED_WITH_FINAL:
                    bucket.use_newer()
                    bucket.partial = bucket.speculated_with = None
                    shared.advance(bucket, What.TAKEN_BACK)
            shared.taking_back = False
            shared.changed.notify_all()

    def _take_step(self, request: StepRequest) -> None:
        shared, hyperparameters = self._shared, request.clipped(self._clip_grad)
        redone = False
        self._queue.finish()
        for bucket in shared.buckets:
            bucket.use_newer()
        if hyperparameters is not None:
            update_momenta(shared, self._queue, hyperparameters, request.without)
        events = ((bucket, self._event_of_step(bucket, hyperparameters, request.without)) for bucket in shared.buckets)
        for this, following in pairwise(chain(events, [None])):
            assert this is not None
            _begin_copy_if_needed(*this)
            if following is not None:
                _begin_copy_if_needed(*following)
            redone |= self._follow(*this, hyperparameters)
        self._queue.finish()
        shared.record(What.STEP_TAKEN)
        shared.num_redone += redone
        shared.note_expectation(request.expected, hyperparameters)
        with shared.changed:
            if shared.request is request:  # the loop may have requested the next step since the last bucket was done
                shared.request = None
            shared.changed.notify_all()

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
                self._queue.send_weights(bucket)
            elif before is BucketState.SPECULATED_AND_FINAL:  # the speculated parameters wait in host memory
                assert bucket.own_copy is not None
                self._queue.send(bucket, bucket.own_copy)
            self._queue.end_step(bucket, event, swaps=event is What.COMMITTED)
            return False
        assert hyperparameters is not None
        if bucket.matrix_kernel is not None:
            self._shared.thread_waits(lambda: bucket.state is BucketState.DIRECTED)
        self._shared.advance(bucket, event)
        if event is What.COMPLETION_BEGUN:
            assert bucket.partial is not None
            self._queue.begin(bucket, hyperparameters, What.COMMITTED, aside=True, only=bucket.partial.to_complete())
            return False
        block = bucket.buffers.block
        aside = bucket.double_buffer is not None and block is not None and self._shared.guard.needs(block)
        self._queue.begin(bucket, hyperparameters, What.UPDATED, aside=aside)
        return before in HOLDS_SPECULATION


def _begin_copy_if_needed(bucket: Bucket, event: What) -> None:
    """Begin the D2H copy of a gradient that the step will read; it may take a reserved slot of the ring."""
    if bucket.grad is not None and (event is What.UPDATE_BEGUN or event is What.COMPLETION_BEGUN):
        bucket.grad.begin(urgent=True)


def close_in_turn(sums: HostGradientSums | None, thread: UpdatingThread) -> None:
    """End the thread of the sums, if there is one, and then the updating thread, which frees the transfers' memory."""
    if sums is not None:
        sums.close()
    thread.close()


def close_once_garbage(
    owner: object, sums: HostGradientSums | None, thread: UpdatingThread
) -> weakref.finalize[[], Any]:
    """Arrange that the threads are closed if ``owner`` is garbage before the result's ``detach`` is called.

    They are closed in a new thread, because the thread that collects garbage may hold a lock that they wait for.
    """
    process = os.getpid()  # a forked child has none of the threads

    def close() -> None:
        thread._shared.transfers.enter_thread()  # a new thread has the first GPU, not its process's
        close_in_turn(sums, thread)

    def begin() -> None:
        if os.getpid() == process:
            threading.Thread(target=close, daemon=True).start()

    end = weakref.finalize(owner, begin)
    end.atexit = False
    return end


def _close_at_exit(thread: weakref.ref[UpdatingThread], process: int) -> None:
    """End the thread before Python ends: it ends threads amid C++ functions, which may abort the process.

    Args:
        process: that has the thread; a forked child has not.
    """
    if (open_one := thread()) is not None and os.getpid() == process:
        open_one.close(EXIT_SECONDS)
