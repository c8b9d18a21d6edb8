"""The CPU optimizer's buckets: their size, and their state in host memory or in files (``--optimizer-nvme-path``).

Sets of a bucket's elements, which may be thousands of ranges, are an int64 array [ranges, 2] of (start, stop),
ascending and disjoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from gptpar.offload.bucket_state import BucketState
from gptpar.offload.step_request import StepHyperparameters
from gptpar.offload.transfers import D2HCopy, DeviceEvent, H2DCopy, StagingBuffer
from gptpar.optim.elementwise import HostKernel
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.torch_kernels import MatrixHostKernel
from gptpar.optim.update import Update
from gptpar.system import pages

Key = TypeVar("Key")

BUCKET_ELEMENTS = 1 << 23
"""Maximum length of a bucket. The next forward pass waits until the bucket in the kernel is done, which favours small
buckets. But updating a bucket must take longer than Python needs to prepare the next one."""


@dataclass(frozen=True)
class Buffers:
    """Master weights and optimizer state of one bucket.

    Attributes:
        vectors: ``weights`` and each of the optimizer's states -> [n].
        block: [bytes] uint8, the memory of all vectors; ``None``: they are in files.
    """

    vectors: Mapping[str, torch.Tensor]
    block: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor:
        return self.vectors["weights"]

    def all(self) -> tuple[torch.Tensor, ...]:
        """The vectors in the order of the kernel's arguments."""
        return tuple(self.vectors.values())

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """All but the master weights."""
        return self.all()[1:]

    @property
    def formats(self) -> dict[str, torch.dtype]:
        """Vector -> its number format."""
        return {name: vector.dtype for name, vector in self.vectors.items()}

    @property
    def nbytes(self) -> int:
        return sum(vector.nbytes for vector in self.vectors.values())

    def in_other(self, block: torch.Tensor) -> Buffers:
        """Buffers like these, with the contents of another block of the same size."""
        return _buffers_in(block, self.formats, len(self.weights))


@dataclass(slots=True)
class PartialRanges:
    """The ranges (:mod:`~gptpar.offload.buckets`) of a partial gradient that may still change, and the others.

    The training loop computes both when it submits the gradient: in the updating thread, numpy would wait for Python's
    lock. If nobody knows in advance what will change, nothing is left open, and the final gradient comes with a list of
    what has changed.

    Attributes:
        left_open: the ranges that are not speculated.
        closed: all others.
        changed: returns the ranges in which the final gradient differs; ``None``: it differs in ``left_open`` at most.
    """

    left_open: np.ndarray
    closed: np.ndarray
    changed: Callable[[], np.ndarray] | None = None

    def to_complete(self) -> np.ndarray:
        """The ranges to compute once the gradient is final."""
        return self.left_open if self.changed is None else self.changed()


@dataclass(slots=True)
class Bucket:
    """A range of one unit's offloaded elements.

    Attributes:
        start, stop: position of its elements in the unit's offloaded range.
        group_ranges, counted: see :class:`~gptpar.optim.group_ranges.OffloadedPartition`; positions count from the
            bucket's start.
        kernel: updates it.
        buffers: the valid state.
        double_buffer: the memory of a speculated state; ``None``: this bucket does not speculate.
        parameters: the model parameters on the device.
        own_copy: this bucket's own H2D copy, in whose host memory speculated values wait until they are sent; ``None``:
            the bucket uses the shared copies.
        own_staging: host memory for this bucket's final gradients; ``None``: they come through the ring.
        state: how far the bucket is in the coming step.
        due: whether a step was requested that this bucket has not done.
        grad: the D2H copy of the gradient that the thread uses.
        newer: the D2H copy of a gradient that will replace ``grad``.
        partial: the open and closed ranges if ``grad`` is partial.
        speculated_with: the hyperparameters of the state in the double buffer.
        steps: updates made so far.
        momenta: the device's memory for the Nesterov momentum, and the end of earlier work with this memory.
        matrix_kernel: the kernel, if the update is one of matrices.
        sent: makes later work on the device wait for the new parameters; called with ``True``, it returns when they are
            on the device. ``None``: there is nothing to wait for.
    """

    unit: str
    start: int
    stop: int
    group_ranges: tuple[GroupRange, ...]
    counted: tuple[tuple[int, int], ...]
    kernel: HostKernel
    buffers: Buffers
    parameters: torch.Tensor
    double_buffer: Buffers | None = None
    own_copy: H2DCopy | None = None
    own_staging: StagingBuffer | None = None
    state: BucketState = BucketState.IDLE
    due: bool = False
    grad: D2HCopy | None = None
    newer: D2HCopy | None = None
    partial: PartialRanges | None = None
    speculated_with: StepHyperparameters | None = None
    steps: int = 0
    momenta: tuple[torch.Tensor, DeviceEvent] | None = None
    sent: Callable[[bool], None] | None = None
    matrix_kernel: MatrixHostKernel | None = field(init=False)

    def __post_init__(self) -> None:
        self.matrix_kernel = self.kernel if isinstance(self.kernel, MatrixHostKernel) else None

    def updated(self, buffers: Buffers) -> tuple[torch.Tensor, ...]:
        """The vectors that an update changes; that of matrices has changed the momentum before."""
        return buffers.all() if self.matrix_kernel is None else (buffers.weights,)

    def take_partial(self, grad: D2HCopy, open_ranges: np.ndarray) -> None:
        """Use a gradient that is final outside of ``open_ranges``, which are ranges of the unit."""
        left_open = between(open_ranges, self.start, self.stop) - self.start
        self.grad, self.partial = grad, PartialRanges(left_open, outside(left_open, self.stop - self.start))

    def take_changes(self, changed: Callable[[], np.ndarray]) -> None:
        """Note where the final gradient differs from the partial one, if the bucket has a partial one.

        Args:
            changed: returns ranges of the unit, which the device may still be computing.
        """
        if self.partial is not None:
            self.partial.changed = lambda: between(changed(), self.start, self.stop) - self.start

    def take(self, grad: D2HCopy) -> None:
        """Use a gradient; if there is an earlier one, keep it as ``newer`` until the thread is done with that."""
        if self.grad is None:
            self.grad = grad
        else:
            if self.newer is not None:
                self.newer.release()
            self.newer = grad

    def use_newer(self) -> None:
        """Replace the gradient by the newer one, if there is one."""
        if self.newer is not None:
            assert self.grad is not None
            self.grad.release()
            self.grad, self.newer = self.newer, None

    def forget_gradient(self) -> None:
        """The step is done: release the gradient, and forget the speculation."""
        if self.grad is not None:
            self.grad.release()
        self.grad = self.partial = self.speculated_with = self.momenta = None


def buckets_of(
    partition: OffloadedPartition,
    parameters: torch.Tensor,
    kernels: Sequence[HostKernel],
    dtype: torch.dtype,
    folder: Path | None,
) -> Iterator[Bucket]:
    """Yields a partition's buckets, with state that is zero; the elements of a bucket have one kernel.

    Buckets are equally long, because each costs a fixed time at its beginning and end.

    Args:
        kernels: by group.
        dtype: of the master weights, and of the states that the kernel does not round.
        folder: for files that hold the state; ``None``: the state is in memory.
    """
    for low, high, kernel in alike(partition, kernels):
        formats = {name: kernel.rounded.get(name, dtype) for name in ("weights", *kernel.states)}
        size = -(-(high - low) // -(-(high - low) // BUCKET_ELEMENTS))
        for start in range(low, high, size):
            stop = min(start + size, high)
            part = partition.between(start, stop)
            state = new_buffers(formats, stop - start, folder)
            ranges = part.group_ranges, part.counted
            yield Bucket(partition.unit, start, stop, *ranges, kernel, state, parameters[start:stop])


def alike(partition: OffloadedPartition, of_group: Sequence[Key]) -> Iterator[tuple[int, int, Key]]:
    """(start, stop, value) of neighbouring elements whose groups have the same value; they cover the partition.

    Args:
        of_group: by group.
    """
    parts = [(value, next(run).start) for value, run in groupby(partition.group_ranges, lambda r: of_group[r.group])]
    starts = [0, *(start for _, start in parts[1:])]
    for (value, _), start, stop in zip(parts, starts, [*starts[1:], partition.length], strict=True):
        yield start, stop, value


class StateSize(NamedTuple):
    """The master weights and states of some partitions.

    Attributes:
        elements: number of elements that may be speculated.
        element_bytes: bytes of one of them.
        later: number of the others, whose updates need the norm (:class:`~gptpar.optim.matrix_update.MatrixUpdate`).
        later_bytes: bytes of all of these.
    """

    elements: int
    element_bytes: int
    later: int = 0
    later_bytes: int = 0

    @staticmethod
    def of(partitions: Sequence[OffloadedPartition], updates: Sequence[Update], itemsize: int) -> StateSize:
        """That of partitions.

        Args:
            updates: by group.
            itemsize: bytes of one number.
        """
        found = StateSize(0, 0)
        for start, stop, update in (run for partition in partitions for run in alike(partition, updates)):
            length, num_bytes = stop - start, update.state_bytes(itemsize)
            if isinstance(update, MatrixUpdate):
                found = found._replace(later=found.later + length, later_bytes=found.later_bytes + length * num_bytes)
            else:
                element_bytes = max(found.element_bytes, num_bytes)
                found = found._replace(elements=found.elements + length, element_bytes=element_bytes)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return self.elements * self.element_bytes + self.later_bytes


def add_double_buffers(buckets: Sequence[Bucket], elements: int) -> None:
    """Allow speculation for the model's last ``elements`` elements: their gradients are the first to come.

    Updates of matrices do not speculate (:mod:`gptpar.offload.matrix_phases`).
    """
    for bucket in reversed([one for one in buckets if one.matrix_kernel is None]):
        elements -= bucket.stop - bucket.start
        if elements < 0:
            break
        old = bucket.buffers
        bucket.double_buffer = new_buffers(old.formats, len(old.weights))


def parts_of(buckets: Sequence[Bucket], kind: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(unit, first element within its offloaded range, values) of ``weights``, one of the states, or ``grad``.

    Buckets that do not have the state are left out. Gradients may have come in 16 bits; they are given in the dtype of
    the master weights.
    """
    for bucket in buckets:
        if kind == "grad":
            grad = bucket.newer or bucket.grad
            assert grad is not None
            yield bucket.unit, bucket.start, grad.tensor().to(bucket.buffers.weights.dtype)
        elif kind in bucket.buffers.vectors:
            yield bucket.unit, bucket.start, bucket.buffers.vectors[kind]


def square_of_weights(buckets: Sequence[Bucket]) -> float:
    """Sum of squares of the master weights that this process counts."""
    return sum(
        bucket.kernel.square(bucket.buffers.weights[start:stop]) for bucket in buckets for start, stop in bucket.counted
    )


def bytes_of(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Bytes of master weights and optimizer state, and bytes of their double buffers."""
    doubled = (b.double_buffer.nbytes for b in buckets if b.double_buffer is not None)
    return sum(b.buffers.nbytes for b in buckets), sum(doubled)


def new_buffers(formats: Mapping[str, torch.dtype], length: int, folder: Path | None = None) -> Buffers:
    """State that is zero. All its pages are touched, so that the machine has really given the memory.

    Args:
        formats: vector -> its number format.
        folder: for files that hold the state; ``None``: it is in memory.
    """
    if folder is not None:
        return Buffers({name: _in_file(length, dtype, folder) for name, dtype in formats.items()})
    # One mapping for all vectors: their number per process is limited.
    return _buffers_in(pages.zeros(sum(_stride(length, dtype) for dtype in formats.values())), formats, length)


def _buffers_in(block: torch.Tensor, formats: Mapping[str, torch.dtype], length: int) -> Buffers:
    parts = block.split([_stride(length, dtype) for dtype in formats.values()])
    found = zip(formats.items(), parts, strict=True)
    return Buffers({name: part[: length * dtype.itemsize].view(dtype) for (name, dtype), part in found}, block)


def _stride(length: int, dtype: torch.dtype) -> int:
    """Bytes from one vector of a block to the next."""
    return -(-length * dtype.itemsize // pages.LINE_BYTES) * pages.LINE_BYTES


def _in_file(length: int, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """A vector of zeros in a file without a name: its disk space is freed even if the process is killed."""
    handle, name = tempfile.mkstemp(prefix="gptpar-optimizer-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, length * dtype.itemsize)  # a full disk raises now; later it would be a SIGBUS
        return torch.from_file(name, shared=True, size=length, dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(name)


def ranges_of_rows(rows: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """The elements of some rows of a matrix [num_rows, width]; neighbouring rows are one range.

    Args:
        rows: row numbers, in any order, also repeated.
    """
    marked = np.zeros(num_rows, dtype=np.int8)
    marked[rows] = 1
    return ranges_of_marked(marked, width)


def ranges_of_marked(marked: np.ndarray, width: int) -> np.ndarray:
    """The elements of the rows [num_rows] that are 1 (int8, else 0); neighbouring rows are one range."""
    edges = np.diff(marked, prepend=np.int8(0), append=np.int8(0))
    return np.flatnonzero(edges).reshape(-1, 2) * width


def between(ranges: np.ndarray, low: int, high: int) -> np.ndarray:
    """The intersection of the ranges with [low, high)."""
    first, last = np.searchsorted(ranges[:, 1], low, "right"), np.searchsorted(ranges[:, 0], high, "left")
    return ranges[first:last].clip(low, high)


def outside(ranges: np.ndarray, length: int) -> np.ndarray:
    """The complement of the ranges in [0, length)."""
    gaps = np.concatenate([[0], ranges.ravel(), [length]]).reshape(-1, 2)
    return gaps[gaps[:, 0] < gaps[:, 1]]
