"""SIGTERM and Ctrl-C as a request to save and stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SAME_REQUEST_SECONDS = 2.0
"""A terminal's Ctrl-C reaches a worker twice, once directly and once through torchrun."""


class StopRequest:
    """Remembers that somebody asked the run to stop. Another Ctrl-C, later, stops at once and without saving.

    Attributes:
        signal: the first signal that came.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._when = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals inside the block (in the main thread; elsewhere they are left alone)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._when = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._when > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
