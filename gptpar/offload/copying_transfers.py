"""Transfers for devices whose memory cannot hold all gradients at once: each leaves the device as soon as it is final.

Usually a gradient stays on the device until the CPU has used it. In the worst case that is the end of the backward
pass, when the norm is known, and then the device holds all gradients. Here each bucket has its own host memory. The
copy begins when the gradient is submitted, and the device's memory is freed when the copy is done. The backward pass
waits when it is too far ahead of the copies. The copied values are the same, so no bit changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import torch

from gptpar.offload.buckets import BUCKET_ELEMENTS
from gptpar.offload.gpu_transfers import NUM_H2D_BUFFERS, GpuTransfers
from gptpar.offload.transfers import D2HCopy, DeviceEvent, Passed, SameMemory, StagingBuffer
from gptpar.system.pinned import PinnedMemory, begin_copy, let_follow, waitable_event

ALIGNMENT = 4096
"""Bytes: each slot begins at the beginning of a page."""

MAX_UNITS_WAITING = 2
"""Upper bound of waiting gradients, in multiples of the largest unit: one being copied, one next."""


def copying_bytes(elements: float, itemsize: int, num_units: int = 1) -> int:
    """Pinned memory (bytes) of a GPU's transfers, for gradients and for new parameters; at most some pages more.

    Args:
        elements: of all gradients together.
        num_units: number of units with offloaded elements.
    """
    most_buckets = int(elements // BUCKET_ELEMENTS) + num_units  # most units have one that is not full
    return int(elements * itemsize) + most_buckets * ALIGNMENT + NUM_H2D_BUFFERS * BUCKET_ELEMENTS * itemsize


def aligned(num_bytes: int) -> int:
    """Size of the slot (bytes) for a bucket's gradient."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def max_bytes_waiting(lengths: list[int], itemsize: int) -> int:
    """Upper bound of the bytes of gradients that wait on the device for their copies.

    Args:
        lengths: of the units' gradients, in elements.
    """
    return MAX_UNITS_WAITING * max(lengths) * itemsize


class GradientCopy:
    """A D2H copy of a gradient to its bucket's own host memory, which keeps it until the bucket's next gradient.

    Args:
        grad: on the device; freed once the copy is known to be done.
        values: the host memory, of the same length and type.
        is_made: recorded after the kernels that compute the gradient.
        is_there: recorded after the copy.

    Attributes:
        num_bytes: size of the gradient on the device.
    """

    def __init__(self, grad: torch.Tensor, values: torch.Tensor, is_made: DeviceEvent, is_there: DeviceEvent):
        self.num_bytes = grad.nbytes
        self._grad: torch.Tensor | None = grad
        self._values, self._is_made, self._is_there = values, is_made, is_there
        self._was_made = False

    def made(self) -> bool:
        self._was_made = self._was_made or self._is_made.query()
        return self._was_made

    def begin(self, *, urgent: bool) -> bool:
        return True

    def arrived(self) -> bool:
        if self._grad is not None and self._is_there.query():
            self._grad = None
        return self._grad is None

    def next_point(self) -> DeviceEvent | None:
        return self._is_there if self.made() else self._is_made

    def tensor(self) -> torch.Tensor:
        if not self.arrived():
            self._is_there.synchronize()
            self._grad = None
        return self._values

    def forget_device(self) -> None:
        """Does nothing: :meth:`tensor` has done it."""

    def release(self) -> None:
        """Does nothing: the host memory holds the only copy, which is needed again if the speculation was wrong."""


class CopiesUnderWay:
    """A queue of running copies, oldest first; only the training loop uses it.

    Args:
        max_bytes: upper bound of the device memory that gradients in the queue may keep.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._copies: deque[GradientCopy] = deque()
        self._num_bytes = 0

    def add(self, copy: GradientCopy) -> GradientCopy:
        """Append a copy that has begun."""
        self._copies.append(copy)
        self._num_bytes += copy.num_bytes
        return copy

    def hold_back(self) -> None:
        """Drop finished copies; wait for the oldest ones while the rest keeps more than ``max_bytes``."""
        while self._copies and (self._num_bytes > self._max_bytes or self._copies[0].arrived()):
            oldest = self._copies.popleft()
            oldest.tensor()
            self._num_bytes -= oldest.num_bytes


class CopyingSameMemory(SameMemory):
    """The device is the CPU; its gradients are copied and freed like those of a GPU.

    Args:
        max_bytes: see :class:`CopiesUnderWay`.
    """

    def __init__(self, max_bytes: int):
        self._under_way = CopiesUnderWay(max_bytes)

    def own_staging(self, sizes: Sequence[int]) -> Sequence[StagingBuffer | None]:
        return [(torch.empty(size, dtype=torch.uint8), Passed()) for size in sizes]

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        # Directions of matrices, which a CPU orthogonalizes in fp32, may be wider than the gradients.
        is_wider = slot is not None and len(slot[0]) < grad.nbytes
        values = torch.empty_like(grad) if is_wider else _values_in(slot, grad)
        return self._under_way.add(GradientCopy(grad, values, *self.copy(grad, values)))

    def copy(self, grad: torch.Tensor, values: torch.Tensor) -> tuple[DeviceEvent, DeviceEvent]:
        """Copy; returns the events after the gradient's computation and after the copy."""
        values.copy_(grad)
        return Passed(), Passed()

    def hold_back(self) -> None:
        self._under_way.hold_back()


class CopyingGpuTransfers(GpuTransfers):
    """Each bucket has pinned memory for its gradient; parameters go to the device through a ring.

    Args:
        lengths: of the units' gradients, in elements.
        itemsize: bytes of an element.
    """

    def __init__(self, device: torch.device, lengths: list[int], itemsize: int):
        super().__init__(device, 0, min(BUCKET_ELEMENTS, max(lengths)) * itemsize)
        self._under_way = CopiesUnderWay(max_bytes_waiting(lengths, itemsize))

    def own_staging(self, sizes: Sequence[int]) -> Sequence[StagingBuffer | None]:
        slots = [aligned(size) for size in sizes]
        self._pinned.append(PinnedMemory(sum(slots)))
        return [(slot[:size], Passed()) for slot, size in zip(self._pinned[-1].data.split(slots), sizes, strict=True)]

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        values, is_there = _values_in(slot, grad), waitable_event()
        # One stream copies all gradients in order, so the bucket's previous gradient is there before this one.
        let_follow(self.d2h_stream, cast(torch.cuda.Event, made))
        begin_copy(values, grad, self.d2h_stream)
        is_there.record(self.d2h_stream)
        return self._under_way.add(GradientCopy(grad, values, made, is_there))

    def hold_back(self) -> None:
        self._under_way.hold_back()


def _values_in(slot: StagingBuffer | None, grad: torch.Tensor) -> torch.Tensor:
    assert slot is not None and len(slot[0]) >= grad.nbytes, "a bucket's slot is as large as its gradient"
    return slot[0][: grad.nbytes].view(grad.dtype)
