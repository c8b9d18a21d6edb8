"""Reads numbers and times of a device's work without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from gptpar.errors import GptparError

POLL_SECONDS = 2e-4


class TimingEvent:
    """A point in the device's work, for timing without waiting: a CUDA event, or on a CPU the time of its creation."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._host = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self, timeout_s: float = float("inf"), check: Callable[[], None] = lambda: None) -> None:
        """Return when the device has reached this point.

        Args:
            check: is called repeatedly while waiting, and may raise.

        Raises:
            GptparError: ``timeout_s`` passed first. A transfer that waits for another process looks like this.
        """
        started = time.perf_counter()
        while self._event is not None and not self._event.query():
            if time.perf_counter() - started > timeout_s:
                raise GptparError(
                    f"the device did not finish within {timeout_s / 60:g} minutes: another process is stuck or gone. "
                    "If steps really take so long, raise --distributed-timeout-minutes."
                )
            check()
            time.sleep(POLL_SECONDS)

    def seconds_since(self, earlier: TimingEvent) -> float:
        """Time between two points on the device, which must have reached both."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._host - earlier._host


class Readings:
    """Numbers that the device copies to the host in the background; :meth:`read` waits for them.

    Args:
        numbers: scalars, or a vector.

    Attributes:
        event: follows the copy: once the device has reached it, the numbers are on the host.
    """

    def __init__(
        self, numbers: Sequence[torch.Tensor] | torch.Tensor, timeout_s: float, check: Callable[[], None] = lambda: None
    ):
        self._timeout_s, self._check = timeout_s, check
        if isinstance(numbers, torch.Tensor):
            stacked = numbers.double()
        else:
            stacked = torch.stack([n.detach().double() for n in numbers])
        self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.is_cuda)
        self._host.copy_(stacked, non_blocking=True)
        self.event = TimingEvent(stacked.device)

    def read(self) -> list[float]:
        """Wait for these numbers, not for work queued after them; see :meth:`TimingEvent.wait`."""
        self.event.wait(self._timeout_s, self._check)
        return self._host.tolist()
