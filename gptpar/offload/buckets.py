"""The optimizer's state in host memory, cut into the pieces that are updated at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

from gptpar import pages
from gptpar.offload.row_ranges import outside
from gptpar.offload.transfers import Arrival, Departure, Slot
from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.spans import OffloadedPartition, Span

BUCKET_ELEMENTS = 1 << 23
"""Elements updated, and sent to the device, at a time, at most. After the backward pass the one at work delays what the
next forward pass waits for: small ones do so less, but have to take longer than Python needs between two."""

NOWHERE = np.empty((0, 2), dtype=np.int64)

NEAR = 4
"""Buckets that are brought to the host ahead of the one at work, whatever else is there."""


@dataclass(frozen=True)
class Recipe:
    """What one step does to each element: the rates by group, and what gradients are divided by."""

    rates: tuple[Hyperparameters, ...]
    divisor: float


@dataclass
class Buffers:
    """Master weights and moments of one bucket."""

    weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`CpuAdam.steps <gptpar.optim.cpu_adam.CpuAdam.steps>` takes them."""
        return self.weights, self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True)
class Cut:
    """The ranges (:mod:`~gptpar.offload.row_ranges`) of an early gradient that will change, and the others.

    Both are made when it is offered: numpy would make the updating thread wait for Python.
    """

    open: np.ndarray
    closed: np.ndarray


@dataclass
class Bucket:
    """A range of a piece.

    Attributes:
        start: first element, counted within the piece.
        spans, counted: see :class:`~gptpar.optim.spans.OffloadedPartition`; numbered from the first element.
        now: the valid state.
        beside: room for a speculated state.
        live: the parameters' memory on the device.
        way: one of its own for the parameters' values; default: one that it shares.
        grad: this step's gradient.
        again: the gradient that is to replace it, because its values were changed after they were offered.
        slot: room of its own for complete gradients, if it has any.
        cut: where its values will be changed, if it was offered before it was complete; else any of them may be.
        tried: what the state beside was computed with, but for the open ranges.
        steps: updates made so far.
        settled: whether the last announced step is done here.
        settle_device: lets later work on the device wait for the new parameters, or waits itself if told to.
    """

    unit: str
    start: int
    stop: int
    spans: tuple[Span, ...]
    counted: tuple[tuple[int, int], ...]
    now: Buffers
    beside: Buffers | None = None
    live: torch.Tensor | None = None
    way: Departure | None = None
    grad: Arrival | None = None
    again: Arrival | None = None
    slot: Slot | None = None
    cut: Cut | None = None
    tried: tuple[Recipe, Arrival] | None = None
    steps: int = 0
    settled: bool = True
    settle_device: Callable[[bool], None] | None = None

    def awaits(self, formed: int) -> bool:
        """Whether an early gradient is of use here, of which so many elements of the piece are formed, and new."""
        return self.way is not None and self.grad is None and self.stop <= formed

    def take_early(self, grad: Arrival, still_open: np.ndarray) -> None:
        """Have a gradient that will be complete, but for these ranges."""
        self.grad, self.cut = grad, Cut(still_open, outside(still_open, self.stop - self.start))

    def take(self, grad: Arrival) -> None:
        """Have a gradient, which replaces one that came before."""
        if self.grad is None:
            self.grad = grad
        else:
            self.again = grad

    def replace_grad(self) -> None:
        """Go on with the second gradient, if there is one."""
        if self.again is not None:
            assert self.grad is not None
            self.grad.release()
            self.grad, self.again = self.again, None

    @property
    def speculable(self) -> bool:
        """Whether the state beside can be computed, with a gradient that will hold at least nearly everywhere."""
        lasting = self.again is None or self.cut is not None
        return self.beside is not None and self.grad is not None and self.tried is None and lasting

    def wrong(self, recipe: Recipe | None) -> np.ndarray | None:
        """The ranges in which the state beside is not what a recipe makes of the gradient; ``None``: anywhere."""
        if self.tried is None or self.tried[0] != recipe:
            return None
        if self.tried[1] is self.grad:
            return NOWHERE
        return None if self.cut is None else self.cut.open

    def forget(self) -> None:
        """The gradient and what was tried with it."""
        if self.grad is not None:
            self.grad.release()
        self.grad = self.tried = self.cut = None


def cut_piece(piece: OffloadedPartition, dtype: torch.dtype, folder: Path | None) -> Iterator[Bucket]:
    """A piece's buckets, with state that is zero; with a folder, in files there.

    Equal ones: a small one would cost as much time at its begin and end as a large one.
    """
    size = -(-piece.length // -(-piece.length // BUCKET_ELEMENTS))
    for start in range(0, piece.length, size):
        stop = min(start + size, piece.length)
        part = piece.between(start, stop)
        state = new_buffers(stop - start, dtype, folder)
        yield Bucket(piece.unit, start, stop, part.spans, part.counted, state)


def make_room(buckets: Sequence[Bucket], elements: int) -> None:
    """Allow speculation for some elements: the last ones of the model, since gradients come in that order."""
    for bucket in reversed(buckets):
        elements -= bucket.stop - bucket.start
        if elements < 0:
            break
        bucket.beside = new_buffers(bucket.stop - bucket.start, bucket.now.weights.dtype)


def parts_of(buckets: Sequence[Bucket], kind: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(unit, first element within its piece, values) of ``weights``, ``exp_avg``, ``exp_avg_sq`` or ``grad``.

    Gradients, which may have come in 16 bits, are given in the masters' dtype.
    """
    for bucket in buckets:
        if kind == "grad":
            grad = bucket.again or bucket.grad
            assert grad is not None
            yield bucket.unit, bucket.start, grad.tensor().to(bucket.now.weights.dtype)
        else:
            yield bucket.unit, bucket.start, getattr(bucket.now, kind)


def bytes_of(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Memory of masters and moments, and of what is beside them for speculation."""
    sizes = [(b.stop - b.start) * 3 * b.now.weights.element_size() for b in buckets]
    return sum(sizes), sum(size for size, b in zip(sizes, buckets, strict=True) if b.beside is not None)


def new_buffers(length: int, dtype: torch.dtype, folder: Path | None = None) -> Buffers:
    """State that is zero; written to, so that the memory is really there."""
    if folder is None:
        stride = -(-length * dtype.itemsize // pages.LINE_BYTES) * pages.LINE_BYTES
        thirds = pages.zeros(3 * stride).split(stride)  # one mapping: a process may have only so many
        return Buffers(*(third[: length * dtype.itemsize].view(dtype) for third in thirds))
    return Buffers(*(_in_file(length, dtype, folder) for _ in range(3)))


def _in_file(length: int, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """A vector of zeros in a file without a name: its space is free again when the process ends, however it ends."""
    handle, name = tempfile.mkstemp(prefix="gptpar-optimizer-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, length * dtype.itemsize)  # a full disk is told now, not by a SIGBUS later
        return torch.from_file(name, shared=True, size=length, dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(name)


def drop_what_came_too_late(buckets: Sequence[Bucket]) -> None:
    """Early gradients with which nothing was tried until the complete ones were made."""
    for bucket in buckets:
        if bucket.tried is None and bucket.again is not None and bucket.cut is not None and bucket.again.made():
            bucket.replace_grad()
            bucket.cut = None


def shallowest_that_is_here(buckets: Sequence[Bucket]) -> Bucket | None:
    """The one that the next forward pass needs first, of those whose gradient has arrived.

    Not the shallowest that was offered: the host runs far ahead of the device, and that one may be long in coming.
    """
    bring(buckets)
    return next((bucket for bucket in buckets if bucket.grad is not None and bucket.grad.arrived()), None)


def one_is_on_its_way(buckets: Sequence[Bucket]) -> bool:
    """Whether the next gradient will be here in a moment."""
    made = next((bucket.grad for bucket in buckets if bucket.grad is not None and bucket.grad.made()), None)
    return made is not None and made.begin(urgent=False)


def bring(buckets: Sequence[Bucket]) -> None:
    """Start the transfers of what is needed first; where there is no room left, what is needed last makes room.

    Gradients arrive last layer first. If those that came early kept the room, the optimizer would work on them, and
    leave for the end of the step what the next forward pass begins with. Only what is offered before its time comes
    with the last layers, or before: it is at the other end.
    """
    coming = [bucket.grad for bucket in buckets if bucket.grad is not None]
    early = list(takewhile(lambda grad: grad.made(), coming))
    in_order = takewhile(lambda grad: grad.made(), reversed(coming[len(early) :]))  # those before are not yet, either
    made = early + list(in_order)[::-1]
    near, later = made[:NEAR], made[NEAR:]
    for grad in near:
        while not grad.begin(urgent=False) and later:
            later.pop().release()
