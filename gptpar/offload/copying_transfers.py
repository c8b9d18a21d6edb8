"""Gradients leave the device as soon as they are final: for devices that have no room for all of them at once.

Usually a gradient stays on the device until the CPU has used it, in the worst case until the norm is known at the end
of the backward pass: then all of them are there. Here each bucket has host memory of its own, the copy begins when the
gradient is submitted, and the device's memory is given up when the copy is done. The backward pass waits when it is too
far ahead of the copies. What travels is the same, so no bit changes.
"""

from __future__ import annotations

from collections import deque

import torch

from gptpar.offload.buckets import BUCKET_ELEMENTS
from gptpar.offload.transfers import OUTGOING, D2HCopy, DeviceEvent, GpuTransfers, Passed, SameMemory, Slot
from gptpar.system.pinned import PinnedMemory

ALIGNMENT = 4096
"""Bytes: each slot begins on a page of its own."""

MAX_UNITS_WAITING = 2
"""Gradients that may wait for their copy on the device, in sizes of the largest: one travels, one is next."""


def copying_bytes(elements: float, itemsize: int, num_units: int = 1) -> int:
    """Pinned memory for gradients, and for parameters on their way: bytes that a GPU's transfers lock at most.

    Args:
        elements: of all gradients together.
        num_units: over which they are spread.
    """
    most_buckets = int(elements // BUCKET_ELEMENTS) + num_units  # in each unit one may be not full
    return int(elements * itemsize) + most_buckets * ALIGNMENT + OUTGOING * BUCKET_ELEMENTS * itemsize


def slots_bytes(lengths: list[int], itemsize: int) -> int:
    """Pinned memory for the gradients alone.

    Args:
        lengths: of the units' gradients, in elements.
    """
    num_buckets = sum(-(-length // BUCKET_ELEMENTS) for length in lengths)
    return sum(lengths) * itemsize + num_buckets * ALIGNMENT


def max_bytes_waiting(lengths: list[int], itemsize: int) -> int:
    """How many bytes of gradients may wait for their copies.

    Args:
        lengths: of the units' gradients, in elements.
    """
    return MAX_UNITS_WAITING * max(lengths) * itemsize


class GradientCopy:
    """A gradient on its way to host memory of its own, which keeps it until the bucket's next gradient.

    Args:
        grad: on the device; given up when it is known that the copy is done.
        values: the host memory, of the same length and type.
        is_made: after the work that forms the gradient.
        is_there: after the copy.

    Attributes:
        num_bytes: of the device's memory.
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

    def tensor(self) -> torch.Tensor:
        if not self.arrived():
            self._is_there.synchronize()
            self._grad = None
        return self._values

    def release(self) -> None:
        """Nothing: the device has not kept the values, which may be needed again if the step turns out otherwise."""


class CopiesUnderWay:
    """A queue of copies, oldest first; only the training loop uses it.

    Args:
        max_bytes: gradients that may keep memory of the device.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._copies: deque[GradientCopy] = deque()
        self._num_bytes = 0

    def add(self, copy: GradientCopy) -> GradientCopy:
        """A copy that has begun."""
        self._copies.append(copy)
        self._num_bytes += copy.num_bytes
        return copy

    def hold_back(self) -> None:
        """Forget what has arrived; wait for the oldest copies while more than the bound have not."""
        while self._copies and (self._num_bytes > self._max_bytes or self._copies[0].arrived()):
            oldest = self._copies.popleft()
            oldest.tensor()
            self._num_bytes -= oldest.num_bytes


class CopyingSameMemory(SameMemory):
    """The device is the CPU; its gradients are copied and given up like those of a GPU.

    Args:
        max_bytes: see :class:`CopiesUnderWay`.
    """

    def __init__(self, max_bytes: int):
        self._under_way = CopiesUnderWay(max_bytes)

    def own_slot(self, num_bytes: int) -> Slot | None:
        return torch.empty(num_bytes, dtype=torch.uint8), Passed()

    def fetch(self, grad: torch.Tensor, slot: Slot | None = None) -> D2HCopy:
        values = _values_in(slot, grad)
        return self._under_way.add(GradientCopy(grad, values, *self.copy(grad, values)))

    def copy(self, grad: torch.Tensor, values: torch.Tensor) -> tuple[DeviceEvent, DeviceEvent]:
        """Copy; returns when the gradient was made and when it is there."""
        values.copy_(grad)
        return Passed(), Passed()

    def hold_back(self) -> None:
        self._under_way.hold_back()


class CopyingGpuTransfers(GpuTransfers):
    """Pinned memory for the whole gradient; parameters go to the device through a ring.

    Args:
        lengths: of the units' gradients, in elements.
        itemsize: bytes of an element.
    """

    def __init__(self, device: torch.device, lengths: list[int], itemsize: int):
        super().__init__(device, 0, min(BUCKET_ELEMENTS, max(lengths)) * itemsize)
        self._pinned.append(PinnedMemory(slots_bytes(lengths, itemsize)))
        self._unused = self._pinned[-1].data
        self._under_way = CopiesUnderWay(max_bytes_waiting(lengths, itemsize))

    def own_slot(self, num_bytes: int) -> Slot | None:
        slot = self._unused[:num_bytes]
        self._unused = self._unused[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return slot, Passed()

    def fetch(self, grad: torch.Tensor, slot: Slot | None = None) -> D2HCopy:
        values = _values_in(slot, grad)
        is_made = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(self.inward):  # in order: the bucket's last gradient is there before this one
            self.inward.wait_event(is_made)
            values.copy_(grad, non_blocking=True)
            is_there = self.inward.record_event()
        return self._under_way.add(GradientCopy(grad, values, is_made, is_there))

    def hold_back(self) -> None:
        self._under_way.hold_back()

    def close(self) -> None:
        self._unused = self._unused[:0]
        super().close()


def _values_in(slot: Slot | None, grad: torch.Tensor) -> torch.Tensor:
    assert slot is not None and len(slot[0]) >= grad.nbytes, "a bucket's slot is as large as its gradient"
    return slot[0][: grad.nbytes].view(grad.dtype)
