"""An elementwise optimizer over elements whose master weights and state live in host memory.

A thread of its own (:mod:`~gptpar.offload.updating_thread`) updates them in buckets while the device works. It takes
buckets in the order of the forward pass, and each layer waits for its own buckets only. A bucket is updated at one of
two times, with the same result:

- After the backward pass, the global gradient norm and so the clipping factor are known: update in place.
- Before that, if the bucket has a double buffer: assume that nothing will be clipped, and write the new values to the
  double buffer ("speculate"). If the assumption was right, the two buffers are swapped ("commit"). If it was wrong, the
  step is computed again from the old values, and the optimizer does not speculate in the next step ("back off"). With a
  partial gradient, it speculates only on elements that cannot change, or recomputes those that did.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from gptpar.engine.subscriber import HostGradientSums
from gptpar.offload.bucket_state import HAS_FINAL, BucketState, ForbiddenEvent
from gptpar.offload.buckets import Bucket, add_double_buffers, buckets_of, bytes_of, parts_of, square_of_weights
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_sums import HostSums
from gptpar.offload.kernel_queue import KernelQueue
from gptpar.offload.row_comparison import NOTHING, RowComparison
from gptpar.offload.shared_state import SharedState
from gptpar.offload.step_request import StepHyperparameters, StepRequest
from gptpar.offload.transfers import Transfers
from gptpar.offload.updating_thread import UpdatingThread, close_in_turn, close_once_garbage
from gptpar.optim.elementwise import HostKernel
from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.optim.update import Hyperparameters


class HostOptimizer:
    """The CPU optimizer: the engine's :class:`~gptpar.engine.subscriber.Subscriber`, which the training loop calls.

    Args:
        partitions: each unit's offloaded range, in forward order.
        parameters: unit -> the model's parameters on the device, of the same length as the unit's offloaded range.
        dtype: of master weights and optimizer state.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        kernels: by parameter group; each updates buckets of its own.
        transfers: copies between host and device.
        folder: for files that hold the state; ``None``: the state is in memory.
        cores: the only ones on which the thread, and the kernel's threads that it starts, may run.
        speculated_elements: see :meth:`add_double_buffers`.
        partial_unit: the unit whose partial gradients may be submitted; only its buckets with a double buffer use them.
        sums: units whose gradients it adds up over micro-batches; ``None``: the device adds up all.
        log: records what happens to each bucket.

    Attributes:
        shared: the state that it shares with its thread, among it ``guard`` and ``latest_updates``.
        sums: the sums over micro-batches; ``None``: they are not formed here.
        waited_s: seconds spent in :meth:`wait` since the start.
        partial_unit: the unit whose partial gradients are used; ``None``: there is none.
    """

    def __init__(
        self,
        partitions: Sequence[OffloadedPartition],
        parameters: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        clip_grad: float,
        kernels: Sequence[HostKernel],
        transfers: Transfers,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        speculated_elements: int = 0,
        partial_unit: str | None = None,
        sums: Collection[str] | None = None,
        log: EventLog | None = None,
    ):
        self._kernels, self._transfers = kernels, transfers
        self._buckets = [b for one in partitions for b in buckets_of(one, parameters[one.unit], kernels, dtype, folder)]
        self.shared = SharedState(self._buckets, transfers, log)
        staging = transfers.own_staging([bucket.parameters.nbytes for bucket in self._buckets])
        for bucket, slot in zip(self._buckets, staging, strict=True):
            bucket.own_staging = slot
        self.waited_s = 0.0
        self._has_gradients = False  # of the coming step
        self._missed: tuple[int, ...] = ()
        self.partial_unit: str | None = None
        self._open_ranges: dict[str, np.ndarray] = {}
        self._comparisons: dict[str, RowComparison] = {}
        # Double buffers come before the partial gradients' memory, which only buckets with a double buffer get. The
        # thread starts last, when all it reads is there.
        self.add_double_buffers(speculated_elements)
        if partial_unit is not None:
            self._prepare_partial(partial_unit)
        self._queue = KernelQueue(self.shared, kernels)
        self.guard, self.latest_updates = self.shared.guard, self.shared.latest_updates
        self._thread = UpdatingThread(self.shared, self._queue, clip_grad=clip_grad, cores=cores)
        self._thread.start()
        self.sums: HostGradientSums | None = None if sums is None else HostSums(self.shared, dtype, cores, sums)
        self._end = close_once_garbage(self, self.sums, self._thread)

    def _prepare_partial(self, unit: str) -> None:
        """Reserve host memory for partial gradients in those of the unit's buckets that have a double buffer."""
        for bucket in self.shared.of_unit[unit]:
            if bucket.double_buffer is not None:
                bucket.own_copy = self._transfers.keeping_h2d_copy(bucket.parameters)
                bucket.own_staging = self._transfers.reserve_staging()
                self.partial_unit = unit
                self.shared.record(What.PREPARED, bucket)

    def add_double_buffers(self, elements: int) -> None:
        """Allow speculation for the model's last ``elements`` elements."""
        add_double_buffers(self._buckets, elements)

    # A step.

    def expect_step(self, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> None:
        """Announce the coming step's probable hyperparameters: speculation with them may begin."""
        with self.shared.changed:
            self.shared.expected = StepHyperparameters(hyperparameters, loss_scale, self._missed)
            self.shared.changed.notify_all()

    def expect_open_ranges(self, unit: str, ranges: np.ndarray) -> None:
        """Announce the ranges in which a unit's partial gradient may still change in the coming step."""
        self._open_ranges[unit] = ranges

    def compare_partial(self, unit: str, width: int, first: int) -> None:
        """Find what changes after a unit's partial gradient by comparison, in place of :meth:`expect_open_ranges`.

        Args:
            width, first: see :class:`~gptpar.offload.row_comparison.RowComparison`.
        """
        self._comparisons[unit] = RowComparison(width, first, self._transfers)

    def submit_gradient(self, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        """Take a unit's gradient from the device. Its memory must not change until the unit's next gradient.

        A second gradient before the step replaces the first.

        Args:
            formed: ``None``: the gradient is final. Otherwise it is partial: the first ``formed`` elements are
                computed. They may change inside the open ranges (:meth:`expect_open_ranges`), or as
                :meth:`compare_partial` finds, which needs all elements at once and their memory until then. Submit the
                final gradient later; without comparison all may use the same memory.

        Raises:
            ForbiddenEvent: the unit's last step is not done.
        """
        self._has_gradients = True
        made = self._transfers.now()
        with self.shared.changed:
            open_ranges = self._open_ranges.pop(unit, None) if formed is None else self._open_ranges.get(unit)
            if unit in self._comparisons:
                open_ranges = NOTHING
                self._comparisons[unit].submit(grad, self.shared.of_unit[unit], is_final=formed is None)
            for bucket, part in self.shared.parts(unit, grad):
                if formed is None:
                    bucket.take(self._transfers.fetch(part, made, bucket.own_staging))
                    self.shared.advance(bucket, What.SUBMITTED)
                elif open_ranges is not None and self._takes_partial(bucket, formed):
                    bucket.take_partial(self._transfers.fetch(part, made), open_ranges)
                    self.shared.advance(bucket, What.SUBMITTED_PARTIAL)
            if not self.shared.forbids_speculation:  # else the thread has nothing to do before the request
                self.shared.changed.notify_all()
        self._transfers.hold_back()  # without the lock, which the thread needs while this waits

    def _takes_partial(self, bucket: Bucket, formed: int) -> bool:
        """Whether a bucket can speculate with a partial gradient, and has none yet."""
        is_formed = bucket.stop <= formed and bucket.state is BucketState.IDLE
        return is_formed and bucket.own_copy is not None and not self.shared.backs_off and not self.shared.holds

    def step(
        self,
        norm: torch.Tensor,
        hyperparameters: tuple[Hyperparameters, ...],
        loss_scale: float,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Request a step; the thread does it.

        Args:
            norm: the whole model's gradient norm without the loss scale, on the device; not finite: nothing changes.
            hyperparameters: by group.
            without: units that do not change. All others must have a final gradient.

        Raises:
            ForbiddenEvent: another unit has no final gradient.
        """
        unclipped = StepHyperparameters(hyperparameters, loss_scale, self._missed)
        self._announce(StepRequest(self._transfers.read_scalar(norm), unclipped, without, self.shared.expected))

    def cancel(self, *, wait: bool = True) -> None:
        """Forget the gradients of the coming step, and undo its speculation in the device's parameters.

        Args:
            wait: whether to return only when that is done.
        """
        not_finite = self._transfers.read_scalar(torch.tensor(float("nan")))
        self._announce(StepRequest(not_finite, None, frozenset(self.shared.of_unit)))
        if wait:
            self.finish()

    def _announce(self, request: StepRequest) -> None:
        with self.shared.changed:
            for bucket in self._buckets:
                if bucket.state not in HAS_FINAL and bucket.unit not in request.without:
                    raise ForbiddenEvent(What.STEP_REQUESTED, bucket.unit, bucket.start, bucket.stop, bucket.state)
            self.shared.keeps = self._has_gradients = False
            for bucket in self._buckets:
                bucket.due, bucket.momenta = True, None  # which may have come too late for a step that was skipped
            self.shared.record(What.STEP_REQUESTED)
            self.shared.request, self.shared.expected = request, None
            self.shared.changed.notify_all()

    def wait(self, unit: str, *, block: bool = False) -> None:
        """Return when a unit's last step is done. Kernels launched afterwards read the new parameters.

        Args:
            block: whether to return only when the new parameters are on the device, for readers on other streams than
                the current one.

        Raises:
            BaseException: the error that ended the thread.
        """
        if self.shared.log is not None:
            self.shared.log.record(What.WAITED, unit)
        self._wait_for(self.shared.of_unit.get(unit, ()), block)

    def finish(self) -> None:
        """Return when the last step of all units is done; see :meth:`wait`."""
        self._wait_for(self._buckets)
        self.shared.wait_for_step()

    def _wait_for(self, buckets: Sequence[Bucket], block: bool = False) -> None:
        # Read without the lock: after a request only the thread clears ``due``, and only once.
        if [bucket for bucket in buckets if bucket.due]:
            started = time.perf_counter()
            with record_function("wait for the CPU optimizer"):
                self.shared.loop_waits(lambda: not any(bucket.due for bucket in buckets))
            self.waited_s += time.perf_counter() - started
        if self.shared.failure is not None:
            raise self.shared.failure
        for bucket in buckets:
            sent, bucket.sent = bucket.sent, None
            if sent is not None:
                sent(block)

    def updates(self) -> tuple[int, int]:
        """(number of elements updated, ``num_ahead``), read together; may be called at any time."""
        with self.shared.changed:
            return self.shared.num_updated, self.shared.num_ahead

    @property
    def num_ahead(self) -> int:
        """Number of elements updated from a speculation, over all steps."""
        return self.shared.num_ahead

    @property
    def num_redone(self) -> int:
        """Number of steps in which a speculation was wrong."""
        return self.shared.num_redone

    def busy_s(self) -> tuple[float, float]:
        """Seconds that the kernel's updates and additions took, and those that the updates took."""
        updating = self.shared.busy_s
        return updating + (0.0 if self.sums is None else self.sums.busy_s), updating

    @contextlib.contextmanager
    def without_speculation(self) -> Iterator[None]:
        """A context in which no speculation begins: the device's parameters do not change before the next step."""
        with self.shared.changed:
            self.shared.holds += 1
        try:
            yield
        finally:
            with self.shared.changed:
                self.shared.holds -= 1
                self.shared.changed.notify_all()

    def keep_last_step(self) -> None:
        """Keep the last step's parameters on the device until the coming step is requested.

        Speculation with the coming step's gradients may have changed them already. It is undone, and no more begins.
        """
        assert self.sums is None, "speculation with sums is not watched"
        if self.shared.keeps or not self._has_gradients:  # without the lock: each layer of each forward pass asks this
            return
        with self.shared.changed:
            self.shared.keeps = self.shared.taking_back = True
            self.shared.changed.notify_all()
        self.shared.loop_waits(lambda: not self.shared.taking_back)
        self._wait_for(self._buckets)

    # Updates of matrices, in two phases: see gptpar.offload.matrix_phases and Subscriber.

    def expect_momenta(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        free = self._transfers.now()
        with self.shared.changed:
            for bucket in self.shared.matrix_buckets(unit):
                bucket.momenta = memory(bucket.start, bucket.stop), free
            self.shared.changed.notify_all()

    def wait_for_momenta(self, unit: str) -> None:
        buckets = self.shared.matrix_buckets(unit)
        self.shared.loop_waits(lambda: all(b.state is BucketState.AVERAGED or not b.due for b in buckets))
        for bucket in buckets:
            sent, bucket.sent = bucket.sent, None
            if sent is not None:
                sent(False)

    def submit_directions(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        with self.shared.changed:
            for bucket in self.shared.matrix_buckets(unit):
                if bucket.due:  # not where the step is skipped
                    direction = memory(bucket.start, bucket.stop)
                    bucket.take(self._transfers.fetch(direction, self._transfers.now(), bucket.own_staging))
                    self.shared.advance(bucket, What.DIRECTED)
            self.shared.changed.notify_all()
        self._transfers.hold_back()

    # Between steps.

    def miss(self, steps: tuple[int, ...]) -> None:
        """Subtract the steps that some groups have missed from the number of the coming steps; ``steps``: by group."""
        self._missed = steps

    def divide_groups(self, partitions: Sequence[OffloadedPartition], origins: Sequence[int]) -> None:
        """See :class:`~gptpar.engine.subscriber.Subscriber`."""
        self._queue.use_kernels([self._kernels[group] for group in origins])
        self.shared.regroup(partitions)

    def publish(self) -> None:
        """Copy all master weights to the device, after they were changed from outside."""
        self.finish()
        for bucket in self._buckets:
            self._queue.send_weights(bucket)
        self.finish()

    def close(self) -> None:
        """End the threads, after a requested step, and free the memory of the transfers."""
        self._end.detach()
        close_in_turn(self.sums, self._thread)

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted."""
        self.finish()
        return max(bucket.steps for bucket in self._buckets)

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        for unit in self.shared.of_unit:
            self.set_steps(unit, count)

    def steps_of(self, unit: str) -> int:
        """Number of a unit's updates so far; skipped steps and steps without its gradient do not count."""
        self.finish()
        return self.shared.of_unit[unit][0].steps

    def set_steps(self, unit: str, count: int) -> None:
        """Continue as if the unit had been updated ``count`` times."""
        self.finish()
        for bucket in self.shared.of_unit[unit]:
            bucket.steps = count

    def parts(self, kind: str, *, beside_loop: bool = False) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See :func:`~gptpar.offload.buckets.parts_of` and :class:`~gptpar.engine.subscriber.Subscriber`."""
        if beside_loop:
            self.shared.wait_for_step()
        else:
            self.finish()
        return parts_of(self._buckets, kind)

    def square_of_weights(self) -> float:
        """Sum of squares of the master weights that this process counts."""
        self.finish()
        return square_of_weights(self._buckets)

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of master weights and optimizer state, and bytes of their double buffers."""
        return bytes_of(self._buckets)

    def bytes_of(self, kind: str) -> int:
        """Bytes of ``weights`` or one of the states."""
        return sum(values.nbytes for _, _, values in list(parts_of(self._buckets, kind)))

    @property
    def kernel(self) -> str:
        """The kernel's instruction set and number of threads, for the banner."""
        return f"{self._kernels[0].isa}, {self._kernels[0].threads} thread(s)"
