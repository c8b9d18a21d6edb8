"""How gradients come to the host and new parameters go to the device.

On a GPU both travel through pinned buffers on streams of their own, in both directions at once; where the "device" is
the CPU itself, nothing travels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from gptpar.system.pinned import PinnedMemory, as_device_memory

RING_BYTES = 1 << 30
"""Pinned memory for what is travelling, whatever the model's size."""

RESERVED = 2
"""Slots for gradients that only the updating thread may take: it would wait for ever if later ones held them all."""

NUMBERS = 16
"""Places for scalars that are on their way, used in turn; two at most are."""

OUTGOING = 3
"""Slots for new parameters: one being filled, one to be filled next, one on its way."""


class DeviceEvent(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Passed:
    """A point in the work of a CPU, which is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


Slot = tuple[torch.Tensor, DeviceEvent]
"""Host memory (uint8) that the device can write to, and an event after which it is no longer written to."""


class D2HCopy(Protocol):
    """A gradient on its way to the host."""

    def made(self) -> bool:
        """Whether the device has computed it."""

    def begin(self, *, urgent: bool) -> bool:
        """Start the transfer, if it has not started and there is room; what is urgent may take the last room.

        Returns:
            Whether it has room.
        """

    def arrived(self) -> bool:
        """Whether :meth:`tensor` would return at once."""

    def tensor(self) -> torch.Tensor:
        """The values in host memory, once they are there; valid until :meth:`release`."""

    def release(self) -> None:
        """Give up the room in host memory, if it has any; :meth:`begin` would bring the values once more."""


class Later(Protocol):
    """A scalar that the device may still have to compute."""

    def known(self) -> bool:
        """Whether :meth:`value` would return at once."""

    def value(self) -> float:
        """It, once it is there."""


class H2DCopy(Protocol):
    """New parameters on their way to the device."""

    @property
    def values(self) -> torch.Tensor:
        """Host memory in which they can be written, from now on: what was sent from it before has left."""

    def send(self) -> Callable[[bool], None]:
        """Start the way of what was written.

        The result, called anywhere, lets later work on the device wait for it; given ``True`` it returns when it is
        there.
        """


class Transfers(Protocol):
    """A way to and from a device."""

    def enter_thread(self) -> None:
        """To be called once by the updating thread."""

    def fetch(self, grad: torch.Tensor, slot: Slot | None = None) -> D2HCopy:
        """Begin to bring a finished gradient to the host, behind what the device was given so far.

        Args:
            slot: the bucket's own, or one that was set aside, of which the gradient before is not needed any more.
        """

    def own_slot(self, num_bytes: int) -> Slot | None:
        """Room for each gradient of one bucket; ``None``: the bucket's gradients share a ring with the others'."""

    def hold_back(self) -> None:
        """Wait while too many submitted gradients keep memory of the device. To be called without a lock."""

    def reserve_slot(self) -> Slot | None:
        """A slot for gradients that have to come as soon as they are made; ``None``: none is needed, or to spare."""

    def outgoing(self, target: torch.Tensor) -> H2DCopy:
        """A way for the new values of ``target``; at most two may be open, that were not sent."""

    def keeping(self, target: torch.Tensor) -> H2DCopy:
        """A way for ``target`` alone, to be used again and again: its memory keeps values until they are sent."""

    def later(self, number: torch.Tensor) -> Later:
        """A scalar of the device, to be read from another thread."""

    def close(self) -> None:
        """Give back what was reserved, when all has arrived; there are no transfers afterwards."""


class SameMemory:
    """The device is the CPU."""

    def enter_thread(self) -> None: ...

    def fetch(self, grad: torch.Tensor, slot: Slot | None = None) -> D2HCopy:
        return _Here(grad)

    def own_slot(self, num_bytes: int) -> Slot | None:
        return None

    def hold_back(self) -> None: ...

    def reserve_slot(self) -> Slot | None:
        return None

    def outgoing(self, target: torch.Tensor) -> H2DCopy:
        return _InPlace(target)

    def keeping(self, target: torch.Tensor) -> H2DCopy:
        return _Kept(torch.empty_like(target), target)

    def later(self, number: torch.Tensor) -> Later:
        return _Number(number)

    def close(self) -> None: ...


@dataclass(frozen=True)
class _InPlace:
    values: torch.Tensor

    def send(self) -> Callable[[bool], None]:
        return lambda block: None


@dataclass(frozen=True)
class _Kept:
    values: torch.Tensor
    target: torch.Tensor

    def send(self) -> Callable[[bool], None]:
        self.target.copy_(self.values)
        return lambda block: None


class _Number:
    def __init__(self, number: torch.Tensor):
        self._number = number

    def known(self) -> bool:
        return True

    def value(self) -> float:
        return self._number.item()


class _Here:
    def __init__(self, grad: torch.Tensor):
        self._grad = grad

    def made(self) -> bool:
        return True

    def begin(self, *, urgent: bool) -> bool:
        return True

    def arrived(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        return self._grad

    def release(self) -> None: ...


def ring_slots(num_buckets: int, bucket_bytes: int) -> tuple[int, int]:
    """(slots for gradients, slots for parameters) within ``RING_BYTES``, or the fewest that work.

    Args:
        num_buckets: those whose gradients come through the ring.
    """
    if not num_buckets:
        return 0, OUTGOING
    total = max(RESERVED + 1 + OUTGOING, RING_BYTES // max(1, bucket_bytes))
    return min(num_buckets + RESERVED, total - OUTGOING), OUTGOING


def ring_bytes(num_buckets: int, bucket_bytes: int) -> int:
    """Pinned memory of :class:`GpuTransfers`."""
    slot_bytes = _slot_bytes(bucket_bytes)
    return sum(ring_slots(num_buckets, slot_bytes)) * slot_bytes


def _slot_bytes(bucket_bytes: int) -> int:
    return math.ceil(bucket_bytes / 4096) * 4096


class GpuTransfers:
    """Pinned rings and streams: gradients come in the order in which they are submitted, unless one is asked for.

    Args:
        num_buckets: buckets whose gradients share the ring.
        bucket_bytes: size of the largest, in the dtype in which gradients or parameters travel.
    """

    def __init__(self, device: torch.device, num_buckets: int, bucket_bytes: int):
        self._device = device
        slot_bytes = _slot_bytes(bucket_bytes)
        incoming, outgoing = ring_slots(num_buckets, slot_bytes)
        self._pinned = [PinnedMemory((incoming + outgoing) * slot_bytes)]
        # Not registered but allocated: that has the same address on every device.
        self._numbers = itertools.cycle(torch.zeros(NUMBERS * 8, dtype=torch.uint8, pin_memory=True).split(8))
        slots = [(slot, torch.cuda.Event()) for slot in self._pinned[0].data.split(slot_bytes)]
        self.free: list[Slot] = [*slots[:incoming]]
        self._out = slots[incoming:]
        self._turn, self._shared = 0, incoming // 2
        self.inward, self.overtaking, self._reserved, self._outward = (torch.cuda.Stream(device) for _ in range(4))

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def fetch(self, grad: torch.Tensor, slot: Slot | None = None) -> D2HCopy:
        coming = _Coming(self, grad, slot)
        if slot is not None:
            coming.start(self._reserved)
        elif len(self.free) > RESERVED:
            coming.start(self.inward)
        return coming

    def own_slot(self, num_bytes: int) -> Slot | None:
        return None

    def hold_back(self) -> None: ...

    def reserve_slot(self) -> Slot | None:
        return self.free.pop() if len(self.free) > max(self._shared, RESERVED + 1) else None

    def outgoing(self, target: torch.Tensor) -> H2DCopy:
        if target.device.type == "cpu":  # parameters that live in host memory, too
            return _InPlace(target)
        slot, left = self._out[self._turn]
        self._turn = (self._turn + 1) % len(self._out)
        return _Going(slot[: target.nbytes].view(target.dtype), target, left, self._outward)

    def keeping(self, target: torch.Tensor) -> H2DCopy:
        if target.device.type == "cpu":
            return _Kept(torch.empty_like(target), target)
        self._pinned.append(PinnedMemory(target.nbytes))
        return _Going(self._pinned[-1].data.view(target.dtype), target, torch.cuda.Event(), self._outward)

    def later(self, number: torch.Tensor) -> Later:
        return _ComingNumber(number.to(self._device), next(self._numbers))

    def close(self) -> None:
        for stream in (self.inward, self.overtaking, self._reserved, self._outward):
            stream.synchronize()
        self.free, self._out = [], []
        for memory in self._pinned:
            memory.close()


@dataclass(frozen=True)
class _Going:
    memory: torch.Tensor
    target: torch.Tensor
    left: torch.cuda.Event
    stream: torch.cuda.Stream

    @property
    def values(self) -> torch.Tensor:
        if not self.left.query():  # which does not let other threads have Python
            self.left.synchronize()
        return self.memory

    def send(self) -> Callable[[bool], None]:
        there = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.memory, non_blocking=True)
            self.left.record()
            there.record()
        return lambda block: there.synchronize() if block else torch.cuda.current_stream().wait_event(there)


class _ComingNumber:
    """A number that a kernel writes into host memory: a copy would queue behind those of gradients."""

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


class _Coming:
    """A gradient that waits on the device until there is a slot for it, unless it has one of its own."""

    def __init__(self, transfers: GpuTransfers, grad: torch.Tensor, own: Slot | None):
        self._transfers, self._grad = transfers, grad
        self._made, self._there = torch.cuda.Event(), torch.cuda.Event()
        self._made.record()
        self._is_made = False
        self._slot = self._own = own
        self._here: torch.Tensor | None = None

    def made(self) -> bool:
        self._is_made = self._is_made or self._made.query()
        return self._is_made

    def begin(self, *, urgent: bool) -> bool:
        if self._slot is None and len(self._transfers.free) > (0 if urgent else RESERVED):
            self.start(self._transfers.overtaking)
        return self._slot is not None

    def start(self, stream: torch.cuda.Stream) -> None:
        self._slot = self._own or self._transfers.free.pop()
        with torch.cuda.stream(stream):
            stream.wait_event(self._made)
            # what was released unread may still be on its way there
            stream.wait_event(cast(torch.cuda.Event, self._slot[1]))
            self._here = self._slot[0][: self._grad.nbytes].view(self._grad.dtype)
            self._here.copy_(self._grad, non_blocking=True)
            self._there = stream.record_event()

    def arrived(self) -> bool:
        return self._slot is not None and self._there.query()

    def tensor(self) -> torch.Tensor:
        self.begin(urgent=True)
        if not self._there.query():
            self._there.synchronize()
        assert self._here is not None
        return self._here

    def release(self) -> None:
        if self._slot is not None and self._own is None:
            self._transfers.free.append((self._slot[0], self._there))
            self._slot = None
