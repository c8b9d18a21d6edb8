"""The interface of copies between host and device, and the copies of a device that is the CPU itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

MAX_UNSENT = 5
"""H2D copies that may be prepared before they are sent: one for each update that the kernel has at a time."""


class DeviceEvent(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the device has passed this point."""

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""


class Passed:
    """A point that the CPU has passed already: its work is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


StagingBuffer = tuple[torch.Tensor, DeviceEvent]
"""Host memory (uint8) for a copy from the device, and the event at the end of the last copy to it."""


class D2HCopy(Protocol):
    """The copy of a gradient from device to host."""

    def made(self) -> bool:
        """Whether the device has computed the gradient."""

    def begin(self, *, urgent: bool) -> bool:
        """Start the copy if it has not started and a slot is free; an urgent copy may take a reserved slot.

        Returns:
            Whether the copy has a slot.
        """

    def arrived(self) -> bool:
        """Whether :meth:`tensor` would return at once."""

    def next_point(self) -> DeviceEvent | None:
        """The point where the device has computed the gradient, or then copied it; ``None``: neither is under way."""

    def tensor(self) -> torch.Tensor:
        """Wait for the copy; returns the values in host memory, which are valid until :meth:`release`."""

    def forget_device(self) -> None:
        """Give up the device's memory, after :meth:`tensor`: no copy begins any more."""

    def release(self) -> None:
        """Give back the slot, if there is one; :meth:`begin` would start the copy anew."""


class PendingScalar(Protocol):
    """A scalar of the device, which may still be computing it."""

    def known(self) -> bool:
        """Whether :meth:`value` would return at once."""

    def value(self) -> float:
        """Wait for the scalar."""


class H2DCopy(Protocol):
    """The copy of new parameters from host to device."""

    @property
    def values(self) -> torch.Tensor:
        """The host memory to write the parameters to. Waits until the last copy from this memory is done."""

    def send(self) -> Callable[[bool], None]:
        """Start the copy.

        Returns:
            A call that makes later work on the current stream wait for the copy. With ``True``, it returns when the
            copy is done.
        """


class Transfers(Protocol):
    """Copies between host memory and one device."""

    def enter_thread(self) -> None:
        """The updating thread calls this once when it begins."""

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        """Begin the D2H copy of a gradient.

        Args:
            made: the point where the device has computed it (:meth:`now`); the copy follows it.
            slot: this bucket's own; the gradient in it is overwritten. ``None``: take one from the ring.
        """

    def later(self, grad: torch.Tensor, made: DeviceEvent) -> D2HCopy:
        """The same copy through the ring, which :meth:`D2HCopy.begin` begins."""

    def own_staging(self, sizes: Sequence[int]) -> Sequence[StagingBuffer | None]:
        """Reserve host memory for each bucket's gradients, once; ``None``: they go through the ring.

        Args:
            sizes: bytes, by bucket.
        """

    def hold_back(self) -> None:
        """Wait while submitted gradients keep too much of the device's memory. The caller must not hold a lock."""

    def reserve_staging(self) -> StagingBuffer | None:
        """Take a slot out of the ring for one bucket's partial gradients; ``None``: none is needed, or none is free."""

    def now(self) -> DeviceEvent:
        """The end of the device's work that was launched so far."""

    def h2d_copy(self, target: torch.Tensor, after: DeviceEvent | None = None) -> H2DCopy:
        """Prepare an H2D copy to ``target``. At most ``MAX_UNSENT`` may be unsent at a time.

        Args:
            after: the device does not write to ``target`` before this point.
        """

    def keeping_h2d_copy(self, target: torch.Tensor) -> H2DCopy:
        """Prepare an H2D copy to ``target`` with its own host memory, which keeps the values until they are sent."""

    def read_scalar(self, number: torch.Tensor) -> PendingScalar:
        """Begin to copy a scalar from device to host, for another thread to read."""

    def read_flags(self, flags: torch.Tensor) -> Callable[[], np.ndarray]:
        """Begin to copy flags [n] (bool) to the host, once a step.

        Returns:
            A function that waits for them and returns them as int8, valid until the next step's.
        """

    def close(self) -> None:
        """Wait for all copies and free the memory; afterwards no copy can be made."""


class SameMemory:
    """The device is the CPU."""

    def enter_thread(self) -> None: ...

    def fetch(self, grad: torch.Tensor, made: DeviceEvent, slot: StagingBuffer | None = None) -> D2HCopy:
        return _CpuGradient(grad)

    def later(self, grad: torch.Tensor, made: DeviceEvent) -> D2HCopy:
        return self.fetch(grad, made)

    def own_staging(self, sizes: Sequence[int]) -> Sequence[StagingBuffer | None]:
        return [None] * len(sizes)

    def hold_back(self) -> None: ...

    def reserve_staging(self) -> StagingBuffer | None:
        return None

    def now(self) -> DeviceEvent:
        return Passed()

    def h2d_copy(self, target: torch.Tensor, after: DeviceEvent | None = None) -> H2DCopy:
        return WrittenInPlace(target)

    def keeping_h2d_copy(self, target: torch.Tensor) -> H2DCopy:
        return CopiedWhenSent(torch.empty_like(target), target)

    def read_scalar(self, number: torch.Tensor) -> PendingScalar:
        return _CpuScalar(number)

    def read_flags(self, flags: torch.Tensor) -> Callable[[], np.ndarray]:
        return flags.view(torch.int8).numpy

    def close(self) -> None: ...


@dataclass(frozen=True)
class WrittenInPlace:
    """The copy to parameters in host memory, to which the new values are written at once."""

    values: torch.Tensor

    def send(self) -> Callable[[bool], None]:
        return lambda block: None


@dataclass(frozen=True)
class CopiedWhenSent:
    """The copy to parameters in host memory, whose new values wait in memory of their own until they are sent."""

    values: torch.Tensor
    target: torch.Tensor

    def send(self) -> Callable[[bool], None]:
        self.target.copy_(self.values)
        return lambda block: None


class _CpuScalar:
    def __init__(self, number: torch.Tensor):
        self._number = number

    def known(self) -> bool:
        return True

    def value(self) -> float:
        return self._number.item()


class _CpuGradient:
    def __init__(self, grad: torch.Tensor):
        self._grad = grad

    def made(self) -> bool:
        return True

    def begin(self, *, urgent: bool) -> bool:
        return True

    def arrived(self) -> bool:
        return True

    def next_point(self) -> DeviceEvent | None:
        return None

    def tensor(self) -> torch.Tensor:
        return self._grad

    def forget_device(self) -> None: ...

    def release(self) -> None: ...
