"""Copies gradients to the host and new parameters to a GPU through a ring of pinned memory, on streams of its own."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from gptpar.offload.transfers import (
    MAX_UNSENT,
    CopiedWhenSent,
    D2HCopy,
    DeviceEvent,
    H2DCopy,
    PendingScalar,
    StagingBuffer,
    WrittenInPlace,
)
from gptpar.system.pinned import (
    PinnedMemory,
    as_device_memory,
    begin_copy,
    current_stream,
    let_follow,
    record,
    waitable_event,
)

RING_BYTES = 1 << 30
"""Pinned memory for copies in flight, whatever the model's size; sums on the host may take more."""

SUMMED_PART = 3
"""With sums on the host, the ring holds 1 / SUMMED_PART of a micro-batch's gradients. The forward pass takes a
third of the time, and submits none: meanwhile the host adds what is in the ring."""

RESERVED = 2
"""Slots for copies that a thread waits for: the updating thread's, or an addend's. Without them, gradients that nobody
needs yet could fill the ring, and the threads would wait for ever."""

NUMBERS = 16
"""Places for scalars that are being copied, used in turn; at most two are in use at once."""

NUM_H2D_BUFFERS = MAX_UNSENT + 2
"""Slots for new parameters: those of the kernel's updates, and two that are being copied."""


def summed_ring_bytes(gradient_bytes: float) -> int:
    """Pinned memory (bytes) for copies in flight where the host adds up micro-batches' gradients.

    Args:
        gradient_bytes: of a micro-batch.
    """
    return max(RING_BYTES, int(gradient_bytes) // SUMMED_PART)


def ring_slots(num_buckets: int, bucket_bytes: int, num_bytes: int = 0) -> tuple[int, int]:
    """(slots for gradients, slots for parameters) that fit in the ring, or the minimum if that is more.

    Args:
        num_buckets: number of buckets whose gradients come through the ring.
        num_bytes: of the ring; default: ``RING_BYTES``.
    """
    if not num_buckets:
        return 0, NUM_H2D_BUFFERS
    total = max(RESERVED + 1 + NUM_H2D_BUFFERS, (num_bytes or RING_BYTES) // max(1, bucket_bytes))
    return min(num_buckets + RESERVED, total - NUM_H2D_BUFFERS), NUM_H2D_BUFFERS


def ring_bytes(num_buckets: int, bucket_bytes: int) -> int:
    """Bytes of pinned memory of :class:`GpuTransfers`."""
    slot_bytes = _slot_bytes(bucket_bytes)
    return sum(ring_slots(num_buckets, slot_bytes)) * slot_bytes


def _slot_bytes(bucket_bytes: int) -> int:
    return math.ceil(bucket_bytes / 4096) * 4096


class GpuTransfers:
    """Copies through a pinned ring. Gradients are copied in the order of submission, unless one is urgent.

    Args:
        num_buckets: number of buckets whose gradients share the ring.
        bucket_bytes: size of the largest bucket, in the widest dtype in which gradients or parameters are copied.
        num_bytes: see :func:`ring_slots`.

    Attributes:
        slot_bytes: size of a slot for gradients; it doubles when wider gradients come.
    """

    def __init__(self, device: torch.device, num_buckets: int, bucket_bytes: int, num_bytes: int = 0):
        self._device, self._num_buckets, self._num_bytes = device, num_buckets, num_bytes
        slot_bytes = self.slot_bytes = _slot_bytes(bucket_bytes)
        incoming, outgoing = ring_slots(num_buckets, slot_bytes, num_bytes)
        self._pinned = [PinnedMemory((incoming + outgoing) * slot_bytes)]
        # Allocated as pinned, not registered later: so the GPU sees it at the same address as the host.
        self._numbers = itertools.cycle(torch.zeros(NUMBERS * 8, dtype=torch.uint8, pin_memory=True).split(8))
        self._flags = torch.empty(0, dtype=torch.int8)
        slots = [(slot, waitable_event()) for slot in self._pinned[0].data.split(slot_bytes)]
        self.free: list[StagingBuffer] = [*slots[:incoming]]
        self._out = slots[incoming:]
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._turn, self._shared, self._lock = 0, incoming // 2, threading.Lock()
        self.d2h_stream, self.urgent_stream, self._reserved, self._h2d_stream = (
            torch.cuda.Stream(device) for _ in range(4)
        )

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._h2d_stream.query()  # the driver knows the device of a thread from its first call

    def _widen(self) -> None:
        """Make slots of twice the size for gradients; a former one is given up when its copy has been read."""
        self.slot_bytes *= 2
        incoming, _ = ring_slots(self._num_buckets, self.slot_bytes, self._num_bytes)
        self._pinned.append(PinnedMemory(incoming * self.slot_bytes))
        self.free = [(slot, waitable_event()) for slot in self._pinned[-1].data.split(self.slot_bytes)]

    def later(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> _GpuD2HCopy:
        if grad.nbytes > self.slot_bytes:  # a sum in fp32, where 16-bit gradients were not to be added up
            self._widen()
        return _GpuD2HCopy(self, grad, cast(torch.cuda.Event, made), slot)

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        if slot is not None and grad.nbytes > len(slot[0]):
            slot = None
        coming = self.later(grad, made, slot)
        if slot is not None:
            coming.start(self._reserved, slot)
        elif (free := self.take_slot(RESERVED)) is not None:
            coming.start(self.d2h_stream, free)
        return coming

    def take_slot(self, keep: int) -> StagingBuffer | None:
        """Take a slot out of the ring if it has more than ``keep``; several threads do."""
        with self._lock:
            return self.free.pop() if len(self.free) > keep else None

    def own_staging(self, sizes: Sequence[int]) -> Sequence[StagingBuffer | None]:
        return [None] * len(sizes)

    def hold_back(self) -> None: ...

    def reserve_staging(self) -> StagingBuffer | None:
        return self.take_slot(max(self._shared, RESERVED + 1))

    def now(self) -> DeviceEvent:
        point = waitable_event()
        point.record(current_stream())
        return point

    def h2d_copy(self, target: torch.Tensor, after: DeviceEvent | None = None) -> H2DCopy:
        if target.device.type == "cpu":  # the model parameters live in host memory, too
            return WrittenInPlace(target)
        slot, left = self._out[self._turn]
        self._turn = (self._turn + 1) % len(self._out)
        values = self.view(slot, target)
        return _GpuH2DCopy(values, target, left, self._h2d_stream, cast(torch.cuda.Event | None, after))

    def view(self, slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The beginning of a slot, with another tensor's length and type; torch's view() gives Python's lock away."""
        key = slot.data_ptr(), len(like), like.dtype
        if key not in self._views:
            self._views[key] = slot[: like.nbytes].view(like.dtype)
        return self._views[key]

    def keeping_h2d_copy(self, target: torch.Tensor) -> H2DCopy:
        if target.device.type == "cpu":
            return CopiedWhenSent(torch.empty_like(target), target)
        self._pinned.append(PinnedMemory(target.nbytes))
        return _GpuH2DCopy(self._pinned[-1].data.view(target.dtype), target, torch.cuda.Event(), self._h2d_stream)

    def read_scalar(self, number: torch.Tensor) -> PendingScalar:
        return _GpuScalar(number.to(self._device), next(self._numbers))

    def read_flags(self, flags: torch.Tensor) -> Callable[[], np.ndarray]:
        if len(self._flags) != len(flags):
            self._flags = torch.zeros(len(flags), dtype=torch.int8, pin_memory=True)
        here = self._flags
        torch.mul(flags.view(torch.int8), 1, out=as_device_memory(here))  # by a kernel, as in _GpuScalar
        there = torch.cuda.Event()
        there.record()

        def read() -> np.ndarray:
            there.synchronize()
            return here.numpy()

        return read

    def close(self) -> None:
        for stream in (self.d2h_stream, self.urgent_stream, self._reserved, self._h2d_stream):
            stream.synchronize()
        self.free, self._out, self._views = [], [], {}
        for memory in self._pinned:
            memory.close()


@dataclass(frozen=True)
class _GpuH2DCopy:
    memory: torch.Tensor
    target: torch.Tensor
    left: torch.cuda.Event
    stream: torch.cuda.Stream
    after: torch.cuda.Event | None = None

    @property
    def values(self) -> torch.Tensor:
        if not self.left.query():  # query() keeps Python's lock; synchronize() would give it away even with no wait
            self.left.synchronize()
        return self.memory

    def send(self) -> Callable[[bool], None]:
        there = torch.cuda.Event()
        if self.after is not None:
            let_follow(self.stream, self.after)
        begin_copy(self.target, self.memory, self.stream)
        record(self.left, self.stream)
        there.record(self.stream)
        return lambda block: there.synchronize() if block else let_follow(current_stream(), there)


class _GpuScalar:
    """A number that a kernel writes to host memory: a copy would be queued behind the copies of gradients."""

    def __init__(self, number: torch.Tensor, memory: torch.Tensor):
        self._here = memory[: number.nbytes].view(number.dtype)[0]
        torch.mul(number, 1, out=as_device_memory(self._here))
        self._ready = torch.cuda.Event()
        self._ready.record()

    def known(self) -> bool:
        return self._ready.query()

    def value(self) -> float:
        self._ready.synchronize()
        return self._here.item()


class _GpuD2HCopy:
    """A gradient that stays on the device until a slot of the ring is free, or is copied to its bucket's own slot.

    Args:
        made: recorded behind the gradient's computation.
    """

    def __init__(self, transfers: GpuTransfers, grad: torch.Tensor, made: torch.cuda.Event, own: StagingBuffer | None):
        self._transfers = transfers
        self._grad: torch.Tensor | None = grad
        self._made = self._there = made
        self._is_made = False
        self._slot: StagingBuffer | None = None
        self._own = own
        self._here: torch.Tensor | None = None

    def made(self) -> bool:
        self._is_made = self._is_made or self._made.query()
        return self._is_made

    def begin(self, *, urgent: bool) -> bool:
        if self._slot is None and (free := self._transfers.take_slot(0 if urgent else RESERVED)) is not None:
            self.start(self._transfers.urgent_stream, free)
        return self._slot is not None

    def start(self, stream: torch.cuda.Stream, slot: StagingBuffer) -> None:
        assert self._grad is not None
        self._slot = slot
        last = cast(torch.cuda.Event, slot[1])
        let_follow(stream, self._made)
        let_follow(stream, last)  # a copy that was released unread may still be writing to the slot
        self._here = self._transfers.view(slot[0], self._grad)
        begin_copy(self._here, self._grad, stream)
        # An own slot's last copy may still be asked whether it has arrived; a slot of the ring has one copy at a time.
        self._there = last if self._own is None else waitable_event()
        record(self._there, stream)

    def arrived(self) -> bool:
        return self._slot is not None and self._there.query()

    def next_point(self) -> DeviceEvent | None:
        if not self.made():
            return self._made
        return None if self._slot is None else self._there

    def tensor(self) -> torch.Tensor:
        if not self.begin(urgent=True):  # the ring is full of other gradients that wait for the step
            assert self._grad is not None
            self._made.synchronize()
            return self._grad.cpu()
        if not self._there.query():
            self._there.synchronize()
        assert self._here is not None
        return self._here

    def forget_device(self) -> None:
        self._grad = None

    def release(self) -> None:
        if self._slot is not None and self._own is None:
            free = self._transfers.free  # if the ring is widened meanwhile, this list is given up with its slots
            if len(self._slot[0]) == self._transfers.slot_bytes:
                free.append(self._slot)
            self._slot = None
