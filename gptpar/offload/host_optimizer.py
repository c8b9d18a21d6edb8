"""AdamW over elements whose master weights and moments live in host memory.

A thread of its own updates them in pieces ("buckets") while the device works: in the order of the forward pass, of
which each layer waits for its own buckets only. Two ways to win time, with the same numbers:

- After the backward pass the global gradient norm is known, and with it the factor of clipping: update in place.
- Before that, where host memory holds a second set of buffers: assume that nothing will be clipped, and write the new
  values beside the old ones ("speculate"). If that turns out right, the two change places; else the step is computed
  again from the old values, which nothing has touched. Of a gradient that is offered before it is quite complete, the
  elements that will change are left out until it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from gptpar.offload.buckets import (
    Bucket,
    Recipe,
    bytes_of,
    cut_piece,
    drop_what_came_too_late,
    make_room,
    one_is_on_its_way,
    parts_of,
    shallowest_that_is_here,
)
from gptpar.offload.orders import Order
from gptpar.offload.row_ranges import between
from gptpar.offload.switch_interval import SWITCH_INTERVAL
from gptpar.offload.transfers import Transfers
from gptpar.offload.updates import Updates
from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.spans import OffloadedPartition

POLL_SECONDS = 2e-4
SWITCH_SECONDS = 5e-5
"""How long a thread may keep Python to itself. By default that is 5 ms, for which the kernel's thread, back from a
bucket, would wait while the training loop launches work."""

CLOSE_SECONDS = 60.0
DISTRUST_STEPS = 10
"""Steps without speculation after one in which it was wrong: clipping comes in spells."""


class HostOptimizer:
    """Owns the state and the thread; while it lives, Python switches between threads more often.

    Args:
        pieces: in forward order.
        dtype: of master weights and moments.
        clip_grad: clipping by the global norm (0: never).
        adam: the kernel.
        transfers: the way to the device.
        folder: on a disk that the state is to be kept on.
        cores: the only ones the thread and the kernel's threads, which it starts, may run on.
        speculated_elements: see :meth:`make_room`.

    Attributes:
        updates: how long they take, and which were the latest.
        waited_s: time that :meth:`wait` has cost since the start.
        num_redone: steps in which speculation was wrong.
        num_ahead: elements, over all steps, for which it was right: they were updated before the norm was known.
        num_elements: that one step updates.
    """

    def __init__(
        self,
        pieces: Sequence[OffloadedPartition],
        *,
        dtype: torch.dtype,
        clip_grad: float,
        adam: CpuAdam,
        transfers: Transfers,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        speculated_elements: int = 0,
    ):
        self._clip, self._transfers, self.updates = clip_grad, transfers, Updates(adam, transfers)
        self._buckets: list[Bucket] = []
        for piece in pieces:
            self._buckets += cut_piece(piece, dtype, folder)
        self._of_unit: dict[str, list[Bucket]] = {piece.unit: [] for piece in pieces}
        for bucket in self._buckets:
            self._of_unit[bucket.unit].append(bucket)
        self.make_room(speculated_elements)
        self.waited_s, self.num_redone, self.num_ahead = 0.0, 0, 0
        self.num_elements = sum(piece.length for piece in pieces)
        self._cores = cores
        self._order: Order | None = None
        self._foreseen: Recipe | None = None
        self._will_change: dict[str, np.ndarray] = {}
        self._distrust = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        SWITCH_INTERVAL.shorten(SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="gptpar-cpu-adam", daemon=True)
        self._thread.start()

    # What the training loop calls.

    def attach(self, live: dict[str, torch.Tensor]) -> None:
        """Say where the parameters live: unit -> memory on the device, of the piece's length."""
        for bucket in self._buckets:
            bucket.live = live[bucket.unit][bucket.start : bucket.stop]
            bucket.slot = self._transfers.own_slot(bucket.live.nbytes)

    def make_room(self, elements: int) -> None:
        """Allow speculation for some elements: the last ones of the model."""
        make_room(self._buckets, elements)

    def expect_step(self, rates: tuple[Hyperparameters, ...], loss_scale: float) -> None:
        """What the coming step will probably be, so that it may be begun during the backward pass."""
        with self._changed:
            self._foreseen = Recipe(rates, loss_scale)
            self._changed.notify_all()

    def keep_values(self, unit: str) -> bool:
        """Prepare a unit for gradients that are offered early; returns whether that is of use: where it has room."""
        with_room = [bucket for bucket in self._of_unit[unit] if bucket.beside is not None]
        for bucket in with_room:
            assert bucket.live is not None
            bucket.way, bucket.slot = self._transfers.keeping(bucket.live), self._transfers.set_aside()
        return bool(with_room)

    def expect_changes(self, unit: str, changed: np.ndarray) -> None:
        """In which ranges the coming step's gradient of a unit will change after it is offered early."""
        self._will_change[unit] = changed

    def submit_gradient(self, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        """A unit's gradient is complete on the device; the memory must stay as it is until the next step.

        A second one before that replaces the first.

        Args:
            formed: it is not complete yet: so many elements are formed, and may have to be changed in the ranges that
                were foreseen. More of it may be offered, and it will be when it is complete; the memory may be the
                same. Until then the step may be tried with it.
        """
        with self._changed:
            changed = self._will_change.pop(unit, None) if formed is None else self._will_change.get(unit)
            for bucket in self._of_unit[unit]:
                assert bucket.settled, f"{unit} got a gradient before its last step was done"
                part = grad[bucket.start : bucket.stop]
                if formed is None:
                    bucket.take(self._transfers.fetch(part, bucket.slot))
                elif changed is not None and bucket.awaits(formed) and not self._distrust:
                    still_open = between(changed, bucket.start, bucket.stop) - bucket.start
                    bucket.take_early(self._transfers.fetch(part), still_open)
            self._changed.notify_all()
        self._transfers.hold_back()  # without the lock: what is waited for may need the thread

    def step(
        self,
        norm: torch.Tensor,
        rates: tuple[Hyperparameters, ...],
        loss_scale: float,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Announce a step; the thread takes it.

        Args:
            norm: the whole model's gradient norm without the loss scale, on the device; not finite: nothing changes.
            rates: by group.
            without: units that stay as they are. All others must have been offered a gradient.
        """
        self._announce(Order(self._transfers.later(norm), Recipe(rates, loss_scale), without))

    def cancel(self) -> None:
        """Forget the gradients offered for the coming step; parameters have the last step's values again."""
        not_finite = self._transfers.later(torch.tensor(float("nan")))
        self._announce(Order(not_finite, None, frozenset(self._of_unit)))
        self.finish()

    def wait(self, unit: str, *, block: bool = False) -> None:
        """Return when a unit's last step is done; what is put on the device afterwards finds the new parameters.

        Args:
            block: whether to return only when they are there, for readers on streams other than the current one.

        Raises:
            BaseException: what went wrong in the thread.
        """
        self._wait_for(self._of_unit.get(unit, ()), block)

    def finish(self) -> None:
        """Like :meth:`wait`, for everything."""
        self._wait_for(self._buckets)
        with self._changed:
            self._changed.wait_for(lambda: self._order is None or self._failure is not None)
        self._raise()

    def publish(self) -> None:
        """Send all master weights to the device, after they were changed from outside."""
        self.finish()
        for bucket in self._buckets:
            self.updates.send(bucket)
        self.finish()

    def close(self) -> None:
        """End the thread, after an announced step, and give back what transfers have reserved.

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
        """Go on as if there had been so many."""
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
            self.updates.adam.square(bucket.now.weights[start:stop])
            for bucket in self._buckets
            for start, stop in bucket.counted
        )

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Memory of masters and moments, and of what is beside them for speculation."""
        return bytes_of(self._buckets)

    @property
    def kernel(self) -> str:
        """What updates, in a few words."""
        return f"{self.updates.adam.isa}, {self.updates.adam.threads} thread(s)"

    def _announce(self, order: Order) -> None:
        with self._changed:
            for bucket in self._buckets:
                assert bucket.grad is not None or bucket.unit in order.without, f"{bucket.unit} has got no gradient"
                bucket.settled = False
            self._order, self._foreseen = order, None
            self._changed.notify_all()

    def _wait_for(self, buckets: Sequence[Bucket], block: bool = False) -> None:
        started = time.perf_counter()
        with record_function("wait for the CPU optimizer"), self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(bucket.settled for bucket in buckets))
        self.waited_s += time.perf_counter() - started
        self._raise()
        for bucket in buckets:
            if bucket.settle_device is not None:
                bucket.settle_device(block)
                bucket.settle_device = None

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What the thread does.

    def _run(self) -> None:
        try:
            if self._cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)  # of this thread, and of those that it starts
            self._transfers.enter_thread()
            while (work := self._next_work()) is not None:
                work()
        except BaseException as error:  # told to whoever waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_work(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                drop_what_came_too_late(self._buckets)
                order = self._order
                recipe = self._foreseen if order is None else order.unclipped
                speculates = recipe is not None and not self._distrust
                candidates = [bucket for bucket in self._buckets if speculates and bucket.speculable]
                if order is not None and (not candidates or order.norm.known()):
                    return partial(self._take_step, order)
                closing = self._closing and order is None
                bucket = None if closing else shallowest_that_is_here(candidates)
                if bucket is not None:
                    assert recipe is not None
                    return partial(self._speculate, bucket, recipe)
                if self.updates.under_way:
                    return self.updates.land
                if closing:
                    return None
                if one_is_on_its_way(candidates):
                    return self.updates.adam.wake
                self._changed.wait(POLL_SECONDS if candidates else None)

    def _speculate(self, bucket: Bucket, recipe: Recipe) -> None:
        assert bucket.grad is not None
        # The loop may still compute with parameters whose gradient is not complete.
        only = None if bucket.cut is None else bucket.cut.closed
        self.updates.begin(bucket, recipe, bucket.beside, bucket.grad.release, only, sends=bucket.cut is None)
        bucket.tried = recipe, bucket.grad

    def _take_step(self, order: Order) -> None:
        recipe = order.decided(self._clip)
        redone = False
        self.updates.land()
        for bucket in self._buckets:
            bucket.replace_grad()
        for number, bucket in enumerate(self._buckets):
            self._fetch_ahead(number, recipe)
            redone |= self._settle(bucket, None if bucket.unit in order.without else recipe)
        self.updates.land()
        self.num_redone += redone
        self._distrust = DISTRUST_STEPS if redone else max(0, self._distrust - 1)
        with self._changed:
            if self._order is order:  # not the next one, announced since the last bucket was settled
                self._order = None
            self._changed.notify_all()

    def _fetch_ahead(self, number: int, recipe: Recipe | None) -> None:
        """Bring the gradients of this bucket and of the next one, where they will be needed."""
        for bucket in self._buckets[number : number + 2]:
            if recipe is not None and bucket.grad is not None:
                wrong = bucket.wrong(recipe)
                if wrong is None or len(wrong):
                    bucket.grad.begin(urgent=True)

    def _settle(self, bucket: Bucket, recipe: Recipe | None) -> bool:
        """Make the bucket's state that of the step, or begin to; returns whether a speculation was in vain."""
        tried, wrong = bucket.tried is not None, bucket.wrong(recipe)
        if recipe is None:
            if tried:
                self.updates.send(bucket)
            self._settled(bucket, updated=False)
        elif wrong is None:
            self.updates.begin(bucket, recipe, None, partial(self._settled, bucket, updated=True))
        elif len(wrong):
            self.updates.begin(bucket, recipe, bucket.beside, partial(self._adopt, bucket), wrong)
        else:
            if bucket.cut is not None:
                assert bucket.way is not None
                bucket.settle_device = bucket.way.send()
            self._adopt(bucket)
        return tried and wrong is None

    def _adopt(self, bucket: Bucket) -> None:
        assert bucket.beside is not None
        bucket.now, bucket.beside = bucket.beside, bucket.now
        self.num_ahead += bucket.stop - bucket.start
        self._settled(bucket, updated=True)

    def _settled(self, bucket: Bucket, *, updated: bool) -> None:
        bucket.forget()
        bucket.steps += updated
        with self._changed:
            bucket.settled = True
            self._changed.notify_all()
