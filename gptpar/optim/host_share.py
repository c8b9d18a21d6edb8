"""AdamW over elements whose master weights and moments live in host memory.

A thread of its own updates them in pieces ("buckets") while the device works: in the order of the forward pass, of
which each layer waits for its own buckets only. Two ways to win time, with the same numbers:

- After the backward pass the global gradient norm is known, and with it the factor of clipping: update in place.
- Before that, where host memory holds a second set of buffers: assume that nothing will be clipped, and write the new
  values beside the old ones ("speculate"). If that turns out right, the two change places; else the step is computed
  again from the old values, which nothing has touched.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.profiler import record_function

from gptpar.optim.buckets import (
    Bucket,
    HostPiece,
    Rates,
    Recipe,
    cut_piece,
    new_buffers,
    shallowest_that_is_here,
)
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.transfers import Later, Transfers
from gptpar.optim.updates import Updates

POLL_SECONDS = 2e-4
SWITCH_SECONDS = 2e-4
"""How long a thread may keep Python to itself. By default that is 5 ms, for which the kernel's thread, back from a
bucket, would wait while the training loop launches work."""
LEAD_SECONDS = 1.5e-3
"""How long before the end of an update the next one is chosen: later, and the kernel would wait for Python, which has
the training loop to serve as well; sooner, and a gradient that the next forward pass needs earlier might arrive in
between. Beside a loop that never rests the kernel waited 0.6 ms for each bucket with 0.5 ms, and 0.06 ms with these."""

CLOSE_SECONDS = 60.0
DISTRUST_STEPS = 10
"""Steps without speculation after one in which it was wrong: clipping comes in spells."""


@dataclass(frozen=True)
class _Order:
    """An announced step, of which the device may still be computing the ``norm``.

    Attributes:
        unclipped: what it does if that norm is small enough; ``None``: nothing, whatever the norm.
        without: units that have no gradient and stay as they are.
    """

    norm: Later
    unclipped: Recipe | None
    without: frozenset[str]


class HostShare:
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
        waited_s: time that :meth:`wait` has cost since the start.
        num_redone: steps in which speculation was wrong.
        num_ahead: elements, over all steps, for which it was right: they were updated before the norm was known.
        num_elements: that one step updates.
    """

    def __init__(
        self,
        pieces: Sequence[HostPiece],
        *,
        dtype: torch.dtype,
        clip_grad: float,
        adam: CpuAdam,
        transfers: Transfers,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        speculated_elements: int = 0,
    ):
        self._clip, self._transfers, self._updates = clip_grad, transfers, Updates(adam, transfers)
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
        self._order: _Order | None = None
        self._foreseen: Recipe | None = None
        self._distrust = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._switch_before = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_before, SWITCH_SECONDS))
        self._thread = threading.Thread(target=self._run, name="gptpar-cpu-adam", daemon=True)
        self._thread.start()

    # What the training loop calls.

    def attach(self, live: dict[str, torch.Tensor]) -> None:
        """Say where the parameters live: unit -> memory on the device, of the piece's length."""
        for bucket in self._buckets:
            bucket.live = live[bucket.unit][bucket.start : bucket.stop]

    def make_room(self, elements: int) -> None:
        """Allow speculation for some elements: the last ones of the model, since gradients come in that order."""
        for bucket in reversed(self._buckets):
            elements -= bucket.stop - bucket.start
            if elements < 0:
                break
            bucket.beside = new_buffers(bucket.stop - bucket.start, bucket.now.weights.dtype)

    def foresee(self, rates: tuple[Rates, ...], loss_scale: float) -> None:
        """What the coming step will probably be, so that it may be begun during the backward pass."""
        with self._changed:
            self._foreseen = Recipe(rates, loss_scale)
            self._changed.notify_all()

    def offer(self, unit: str, grad: torch.Tensor) -> None:
        """A unit's gradient is complete on the device; the memory must stay as it is until the next step.

        A second one before that replaces the first.
        """
        with self._changed:
            for bucket in self._of_unit[unit]:
                assert bucket.settled, f"{unit} got a gradient before its last step was done"
                coming = self._transfers.fetch(grad[bucket.start : bucket.stop])
                if bucket.grad is None:
                    bucket.grad = coming
                else:  # the thread may be at work on the first one
                    bucket.again = coming
            self._changed.notify_all()

    def step(
        self, norm: torch.Tensor, rates: tuple[Rates, ...], loss_scale: float, without: frozenset[str] = frozenset()
    ) -> None:
        """Announce a step; the thread takes it.

        Args:
            norm: the whole model's gradient norm without the loss scale, on the device; not finite: nothing changes.
            rates: by group.
            without: units that stay as they are. All others must have been offered a gradient.
        """
        self._announce(_Order(self._transfers.later(norm), Recipe(rates, loss_scale), without))

    def cancel(self) -> None:
        """Forget the gradients offered for the coming step; parameters have the last step's values again."""
        not_finite = self._transfers.later(torch.tensor(float("nan")))
        self._announce(_Order(not_finite, None, frozenset(self._of_unit)))
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
            self._updates.send(bucket)
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
            sys.setswitchinterval(self._switch_before)
            if not self._thread.is_alive():
                self._transfers.close()

    @property
    def busy_s(self) -> float:
        """Time in which elements were updated, since the start."""
        return self._updates.busy_s

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
        """(unit, first element within its piece, values) of ``weights``, ``exp_avg``, ``exp_avg_sq`` or ``grad``."""
        self.finish()
        for bucket in self._buckets:
            if kind == "grad":
                assert bucket.grad is not None
                yield bucket.unit, bucket.start, bucket.grad.tensor()
            else:
                yield bucket.unit, bucket.start, getattr(bucket.now, kind)

    def square_of_weights(self) -> float:
        """Sum of squares of the master weights that this process counts."""
        self.finish()
        return sum(
            self._updates.adam.square(bucket.now.weights[run.start : run.stop])
            for bucket in self._buckets
            for run in bucket.runs
            if run.counted
        )

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Memory of masters and moments, and of what is beside them for speculation."""
        sizes = [(b.stop - b.start) * 3 * b.now.weights.element_size() for b in self._buckets]
        return sum(sizes), sum(size for size, b in zip(sizes, self._buckets, strict=True) if b.beside is not None)

    @property
    def kernel(self) -> str:
        """What updates, in a few words."""
        return f"{self._updates.adam.isa}, {self._updates.adam.threads} thread(s)"

    def _announce(self, order: _Order) -> None:
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
                order = self._order
                recipe = self._foreseen if order is None else order.unclipped
                candidates = [] if recipe is None or self._distrust else list(self._speculable())
                if order is not None and (not candidates or order.norm.known()):
                    return partial(self._take_step, order)
                closing = self._closing and order is None
                bucket = None if closing else shallowest_that_is_here(candidates)
                if bucket is not None:
                    assert recipe is not None
                    return partial(self._speculate, bucket, recipe)
                if self._updates.under_way:
                    return self._updates.land
                if closing:
                    return None
                self._changed.wait(POLL_SECONDS if candidates else None)

    def _speculable(self) -> Iterator[Bucket]:
        for bucket in self._buckets:
            if bucket.beside and bucket.grad and bucket.tried is None and bucket.again is None:
                yield bucket

    def _speculate(self, bucket: Bucket, recipe: Recipe) -> None:
        assert bucket.grad is not None
        self._updates.begin(bucket, recipe, bucket.beside, bucket.grad.release)
        bucket.tried = recipe, bucket.grad
        time.sleep(max(0.0, self._updates.pace * (bucket.stop - bucket.start) - LEAD_SECONDS))

    def _take_step(self, order: _Order) -> None:
        recipe = self._decide(order)
        redone = False
        self._updates.land()
        self._replace_grads()
        for number, bucket in enumerate(self._buckets):
            self._fetch_ahead(number, recipe)
            redone |= self._settle(bucket, None if bucket.unit in order.without else recipe)
        self._updates.land()
        self.num_redone += redone
        self._distrust = DISTRUST_STEPS if redone else max(0, self._distrust - 1)
        with self._changed:
            if self._order is order:  # not the next one, announced since the last bucket was settled
                self._order = None
            self._changed.notify_all()

    def _replace_grads(self) -> None:
        for bucket in (bucket for bucket in self._buckets if bucket.again is not None):
            assert bucket.grad is not None
            bucket.grad.release()
            bucket.grad, bucket.again = bucket.again, None

    def _fetch_ahead(self, number: int, recipe: Recipe | None) -> None:
        """Bring the gradients of this bucket and of the next one, where they will be needed."""
        for bucket in self._buckets[number : number + 2]:
            if recipe is not None and bucket.grad is not None and bucket.tried != (recipe, bucket.grad):
                bucket.grad.begin(urgent=True)

    def _decide(self, order: _Order) -> Recipe | None:
        """The step's recipe, with the same arithmetic as on the device; ``None``: a gradient is not finite."""
        norm = order.norm.value()
        if order.unclipped is None or not norm < float("inf"):
            return None
        clipping = max(1.0, (norm + 1e-6) / self._clip) if self._clip > 0 else 1.0
        return replace(order.unclipped, divisor=order.unclipped.divisor * clipping)

    def _settle(self, bucket: Bucket, recipe: Recipe | None) -> bool:
        """Make the bucket's state that of the step, or begin to; returns whether a speculation was in vain."""
        tried, right = bucket.tried, recipe is not None and bucket.tried == (recipe, bucket.grad)
        if recipe is not None and not right:
            self._updates.begin(bucket, recipe, None, partial(self._settled, bucket, updated=True))
            return tried is not None
        if right and bucket.beside is not None:
            bucket.now, bucket.beside = bucket.beside, bucket.now
            self.num_ahead += bucket.stop - bucket.start
        elif tried is not None:
            self._updates.send(bucket)
        self._settled(bucket, updated=right)
        return tried is not None and not right

    def _settled(self, bucket: Bucket, *, updated: bool) -> None:
        if bucket.grad is not None:
            bucket.grad.release()
        bucket.grad = bucket.tried = None
        bucket.steps += updated
        with self._changed:
            bucket.settled = True
            self._changed.notify_all()
