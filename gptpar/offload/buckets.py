"""The optimizer's state in host memory, cut into buckets: the ranges that are updated, and copied, at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gptpar.offload.bucket_state import TRANSITIONS, BucketState, ForbiddenEvent
from gptpar.offload.events import What
from gptpar.offload.index_ranges import outside
from gptpar.offload.step_request import StepHyperparameters
from gptpar.offload.transfers import D2HCopy, H2DCopy, Slot
from gptpar.optim.spans import GroupSpan, OffloadedPartition
from gptpar.system import pages

BUCKET_ELEMENTS = 1 << 23
"""Elements of a bucket, at most. After the backward pass the bucket at work delays what the next forward pass waits
for: small ones do so less, but have to take longer than Python needs between two."""


@dataclass(frozen=True)
class Buffers:
    """Master weights and optimizer state of one bucket.

    Attributes:
        vectors: ``weights`` and each of the optimizer's states -> [n].
    """

    vectors: Mapping[str, torch.Tensor]

    @property
    def weights(self) -> torch.Tensor:
        return self.vectors["weights"]

    def all(self) -> tuple[torch.Tensor, ...]:
        """As the kernel takes them."""
        return tuple(self.vectors.values())

    @property
    def nbytes(self) -> int:
        return sum(vector.nbytes for vector in self.vectors.values())


@dataclass(frozen=True)
class PartialRanges:
    """Which ranges (:mod:`~gptpar.offload.index_ranges`) of a partial gradient will change, and which will not.

    Both are made when it is submitted: numpy would make the updating thread wait for Python.
    """

    open: np.ndarray
    closed: np.ndarray


@dataclass(slots=True)
class Bucket:
    """A range of one unit's offloaded elements.

    Attributes:
        start, stop: its elements, counted within the unit's offloaded range.
        spans, counted: see :class:`~gptpar.optim.spans.OffloadedPartition`; numbered from the first element.
        buffers: the valid state.
        double_buffer: where a speculated state is written; ``None``: nothing is speculated here.
        parameters: their memory on the device.
        own_copy: an H2D copy that only this bucket uses, whose host memory keeps speculated values until they are
            sent; ``None``: it uses the shared ones.
        own_slot: host memory for its final gradients alone; ``None``: they come through the ring.
        state: how far it is with the coming step.
        due: whether a step was requested that is not done here yet.
        grad: the D2H copy of the gradient that the thread works with.
        newer: that of the gradient which is to replace it.
        partial: of a partial gradient, what will change.
        speculated_with: the hyperparameters of the state in the double buffer.
        steps: updates made so far.
        sent: lets later work on the device wait for the new parameters, or, given ``True``, returns when they are
            there; ``None``: there is nothing to wait for.
    """

    unit: str
    start: int
    stop: int
    spans: tuple[GroupSpan, ...]
    counted: tuple[tuple[int, int], ...]
    buffers: Buffers
    parameters: torch.Tensor
    double_buffer: Buffers | None = None
    own_copy: H2DCopy | None = None
    own_slot: Slot | None = None
    state: BucketState = BucketState.IDLE
    due: bool = False
    grad: D2HCopy | None = None
    newer: D2HCopy | None = None
    partial: PartialRanges | None = None
    speculated_with: StepHyperparameters | None = None
    steps: int = 0
    sent: Callable[[bool], None] | None = None

    def advance(self, what: What) -> None:
        """Move to the state after an event.

        Raises:
            ForbiddenEvent: the state does not allow it; naming bucket, state and event.
        """
        following = TRANSITIONS.get((self.state, what))
        if following is None:
            raise ForbiddenEvent(what, self.unit, self.start, self.stop, self.state)
        self.state = following

    def take_partial(self, grad: D2HCopy, open_ranges: np.ndarray) -> None:
        """Work with a gradient that is final but for these ranges."""
        self.grad, self.partial = grad, PartialRanges(open_ranges, outside(open_ranges, self.stop - self.start))

    def take(self, grad: D2HCopy) -> None:
        """Work with a gradient, or keep it until the thread is done with the one before."""
        if self.grad is None:
            self.grad = grad
        else:
            if self.newer is not None:
                self.newer.release()
            self.newer = grad

    def use_newer(self) -> None:
        """Go on with the newer gradient, if there is one."""
        if self.newer is not None:
            assert self.grad is not None
            self.grad.release()
            self.grad, self.newer = self.newer, None

    def forget_gradient(self) -> None:
        """The step is done: release the gradient, and what was speculated with it."""
        if self.grad is not None:
            self.grad.release()
        self.grad = self.partial = self.speculated_with = None


def buckets_of(
    partition: OffloadedPartition,
    parameters: torch.Tensor,
    names: Sequence[str],
    dtype: torch.dtype,
    folder: Path | None,
) -> Iterator[Bucket]:
    """A partition's buckets, with state that is zero; with a folder, in files there.

    Equal ones: a small one would cost as much time at its begin and end as a large one.

    Args:
        names: of the vectors that the optimizer updates.
    """
    size = -(-partition.length // -(-partition.length // BUCKET_ELEMENTS))
    for start in range(0, partition.length, size):
        stop = min(start + size, partition.length)
        part = partition.between(start, stop)
        state = new_buffers(names, stop - start, dtype, folder)
        yield Bucket(partition.unit, start, stop, part.spans, part.counted, state, parameters[start:stop])


def add_double_buffers(buckets: Sequence[Bucket], elements: int) -> None:
    """Allow speculation for some elements: the last ones of the model, since gradients come in that order."""
    for bucket in reversed(buckets):
        elements -= bucket.stop - bucket.start
        if elements < 0:
            break
        old = bucket.buffers
        bucket.double_buffer = new_buffers(list(old.vectors), len(old.weights), old.weights.dtype)


def parts_of(buckets: Sequence[Bucket], kind: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(unit, first element within its offloaded range, values) of ``weights``, one of the states, or ``grad``.

    Gradients, which may have come in 16 bits, are given in the masters' dtype.
    """
    for bucket in buckets:
        if kind == "grad":
            grad = bucket.newer or bucket.grad
            assert grad is not None
            yield bucket.unit, bucket.start, grad.tensor().to(bucket.buffers.weights.dtype)
        else:
            yield bucket.unit, bucket.start, bucket.buffers.vectors[kind]


def bytes_of(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Memory of master weights and optimizer state, and of their double buffers."""
    doubled = (b.double_buffer.nbytes for b in buckets if b.double_buffer is not None)
    return sum(b.buffers.nbytes for b in buckets), sum(doubled)


def new_buffers(names: Sequence[str], length: int, dtype: torch.dtype, folder: Path | None = None) -> Buffers:
    """State that is zero; written to, so that the memory is really there.

    Args:
        names: of the vectors.
    """
    if folder is not None:
        return Buffers({name: _in_file(length, dtype, folder) for name in names})
    num_bytes = length * dtype.itemsize
    stride = -(-num_bytes // pages.LINE_BYTES) * pages.LINE_BYTES
    memory = pages.zeros(len(names) * stride).split(stride)  # one mapping: a process may have only so many
    return Buffers({name: part[:num_bytes].view(dtype) for name, part in zip(names, memory, strict=True)})


def _in_file(length: int, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """A vector of zeros in a file without a name: its space is free again when the process ends, however it ends."""
    handle, name = tempfile.mkstemp(prefix="gptpar-optimizer-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, length * dtype.itemsize)  # a full disk is told now, not by a SIGBUS later
        return torch.from_file(name, shared=True, size=length, dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(name)
