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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gptpar.optim.buckets import Bucket, Buffers, HostPiece, Recipe, cut_piece, new_buffers
from gptpar.optim.cpu_adam import AdamStep, CpuAdam
from gptpar.optim.transfers import Transfers

POLL_SECONDS = 2e-4
DISTRUST_STEPS = 10
"""Steps without speculation after one in which it was wrong: clipping comes in spells."""


@dataclass(frozen=True)
class _Order:
    """An announced step; ``norm`` waits for the device."""

    norm: Callable[[], float]
    lr: float
    weight_decay: float
    loss_scale: float


class HostShare:
    """Owns the state and the thread.

    Args:
        pieces: in forward order.
        dtype: of master weights and moments.
        betas, eps, clip_grad: of AdamW and of clipping by the global norm (0: never).
        adam: the kernel.
        transfers: the way to the device.
        folder: on a disk that the state is to be kept on.
        cores: the only ones the thread and the kernel's threads, which it starts, may run on.
        speculated_elements: for how many elements there is room beside; the first ones of the model that fit, from its
            end backwards, since gradients come in that order.

    Attributes:
        waited_s: time that :meth:`wait` has cost since the start.
        busy_s: time in which elements were updated.
        num_redone: steps in which speculation was wrong.
    """

    def __init__(
        self,
        pieces: Sequence[HostPiece],
        *,
        dtype: torch.dtype,
        betas: tuple[float, float],
        eps: float,
        clip_grad: float,
        adam: CpuAdam,
        transfers: Transfers,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        speculated_elements: int = 0,
    ):
        self._betas, self._eps, self._clip, self._adam, self._transfers = betas, eps, clip_grad, adam, transfers
        self._buckets: list[Bucket] = []
        for piece in pieces:
            self._buckets += cut_piece(piece, dtype, folder)
        self._of_unit: dict[str, list[Bucket]] = {piece.unit: [] for piece in pieces}
        for bucket in self._buckets:
            self._of_unit[bucket.unit].append(bucket)
        for bucket in reversed(self._buckets):
            speculated_elements -= bucket.stop - bucket.start
            if speculated_elements < 0:
                break
            bucket.beside = new_buffers(bucket.stop - bucket.start, dtype)
        self.waited_s, self.busy_s, self.num_redone = 0.0, 0.0, 0
        self._cores = cores
        self._steps = 0
        self._order: _Order | None = None
        self._foreseen: tuple[float, float, float] | None = None
        self._distrust = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gptpar-cpu-adam", daemon=True)
        self._thread.start()

    # What the training loop calls.

    def attach(self, live: dict[str, torch.Tensor]) -> None:
        """Say where the parameters live: unit -> memory on the device, of the piece's length."""
        for bucket in self._buckets:
            bucket.live = live[bucket.unit][bucket.start : bucket.stop]

    def foresee(self, lr: float, weight_decay: float, loss_scale: float) -> None:
        """What the coming step will probably be, so that it may be begun during the backward pass."""
        with self._changed:
            self._foreseen = (lr, weight_decay, loss_scale)

    def offer(self, unit: str, grad: torch.Tensor) -> None:
        """A unit's gradient is complete on the device; the memory must stay as it is until the next step."""
        with self._changed:
            for bucket in self._of_unit[unit]:
                assert bucket.settled, f"{unit} got a gradient before its last step was done"
                bucket.grad = self._transfers.fetch(grad[bucket.start : bucket.stop])
            self._changed.notify_all()

    def step(self, norm: torch.Tensor, lr: float, weight_decay: float, loss_scale: float) -> None:
        """Announce a step; the thread takes it.

        Args:
            norm: the whole model's gradient norm without the loss scale, on the device; not finite: nothing changes.
        """
        order = _Order(self._transfers.later(norm), lr, weight_decay, loss_scale)
        with self._changed:
            for bucket in self._buckets:
                assert bucket.grad is not None, f"{bucket.unit} has got no gradient"
                bucket.settled = False
            self._order, self._foreseen = order, None
            self._changed.notify_all()

    def wait(self, unit: str) -> None:
        """Return when a unit's last step is done; what is put on the device afterwards finds the new parameters.

        Raises:
            BaseException: what went wrong in the thread.
        """
        self._wait_for(self._of_unit.get(unit, ()))

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
            self._send(bucket)
        self.finish()

    def close(self) -> None:
        """End the thread; an announced step is still done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted."""
        self.finish()
        return self._steps

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        self.finish()
        self._steps = count

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
            float(torch.linalg.vector_norm(bucket.now.weights[run.start : run.stop], dtype=torch.float64)) ** 2
            for bucket in self._buckets
            for run in bucket.runs
            if run.counted
        )

    def describe(self) -> str:
        """What is here, for the start of a run."""
        elements = sum(b.stop - b.start for b in self._buckets)
        size = self._buckets[0].now.weights.element_size() * 3
        beside = sum(b.stop - b.start for b in self._buckets if b.beside is not None)
        return (
            f"{elements * size / 2**30:.2f} GiB of masters and moments, {beside * size / 2**30:.2f} GiB beside for "
            f"speculation on {beside / elements:.0%} of them; {self._adam.isa}, {self._adam.threads} thread(s)"
        )

    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(bucket.settled for bucket in buckets))
        self.waited_s += time.perf_counter() - started
        self._raise()
        for bucket in buckets:
            if bucket.settle_device is not None:
                bucket.settle_device()
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
                if self._order is not None:
                    order = self._order
                    return lambda: self._take_step(order)
                if self._closing:
                    return None
                bucket = self._speculable()
                if bucket is not None:
                    recipe = self._expected()
                    return lambda: self._speculate(bucket, recipe)
                on_its_way = self._foreseen is not None and any(b.grad is not None for b in self._buckets)
                self._changed.wait(POLL_SECONDS if on_its_way else None)

    def _speculable(self) -> Bucket | None:
        """The shallowest bucket whose gradient is here: the next forward pass needs it first.

        Not the shallowest that was offered: the host runs far ahead of the device, and that one may be long in coming.
        """
        if self._foreseen is None or self._distrust:
            return None
        for bucket in self._buckets:
            if bucket.beside and bucket.grad and bucket.tried is None:
                bucket.grad.begin(urgent=False)
                if bucket.grad.arrived():
                    return bucket
        return None

    def _expected(self) -> Recipe:
        assert self._foreseen is not None
        lr, weight_decay, loss_scale = self._foreseen
        return Recipe(lr, weight_decay, self._steps + 1, loss_scale)

    def _speculate(self, bucket: Bucket, recipe: Recipe) -> None:
        assert bucket.grad is not None
        self._update(bucket, recipe, bucket.beside)
        bucket.tried = recipe
        bucket.grad.release()

    def _take_step(self, order: _Order) -> None:
        recipe = self._decide(order)
        redone = False
        for number, bucket in enumerate(self._buckets):
            self._fetch_ahead(number, recipe)
            redone |= self._settle(bucket, recipe)
            with self._changed:
                bucket.settled = True
                self._changed.notify_all()
        self.num_redone += redone
        self._distrust = DISTRUST_STEPS if redone else max(0, self._distrust - 1)
        with self._changed:
            self._steps += recipe is not None
            self._order = None
            self._changed.notify_all()

    def _fetch_ahead(self, number: int, recipe: Recipe | None) -> None:
        """Bring the gradients of this bucket and of the next one, where they will be needed."""
        for bucket in self._buckets[number : number + 2]:
            if recipe is not None and bucket.tried != recipe and bucket.grad is not None:
                bucket.grad.begin(urgent=True)

    def _decide(self, order: _Order) -> Recipe | None:
        """The step's recipe, with the same arithmetic as on the device; ``None``: a gradient is not finite."""
        norm = order.norm()
        if not norm < float("inf"):
            return None
        divisor = order.loss_scale
        if self._clip > 0:
            divisor *= max(1.0, (norm + 1e-6) / self._clip)
        return Recipe(order.lr, order.weight_decay, self._steps + 1, divisor)

    def _settle(self, bucket: Bucket, recipe: Recipe | None) -> bool:
        """Make the bucket's state that of the step; returns whether a speculation was in vain."""
        tried, right = bucket.tried, recipe is not None and bucket.tried == recipe
        if right and bucket.beside is not None:
            bucket.now, bucket.beside = bucket.beside, bucket.now
        elif recipe is not None:
            self._update(bucket, recipe, None)
        elif tried is not None:
            self._send(bucket)
        if bucket.grad is not None:
            bucket.grad.release()
        bucket.grad = bucket.tried = None
        return tried is not None and not right

    def _update(self, bucket: Bucket, recipe: Recipe, into: Buffers | None) -> None:
        assert bucket.grad is not None and bucket.live is not None
        grad, low = bucket.grad.tensor(), self._transfers.outgoing(bucket.live)
        started = time.perf_counter()
        for run in bucket.runs:
            weight_decay = recipe.weight_decay if run.decays else 0.0
            how = AdamStep(recipe.lr, *self._betas, self._eps, weight_decay, recipe.step, recipe.divisor)
            at = slice(run.start, run.stop)
            self._adam.step(
                *bucket.now.part(run.start, run.stop),
                grad[at],
                how,
                into=None if into is None else into.part(run.start, run.stop),
                low=low[at],
            )
        self.busy_s += time.perf_counter() - started
        bucket.settle_device = self._transfers.send(low, bucket.live)

    def _send(self, bucket: Bucket) -> None:
        assert bucket.live is not None
        low = self._transfers.outgoing(bucket.live)
        low.copy_(bucket.now.weights)
        bucket.settle_device = self._transfers.send(low, bucket.live)
