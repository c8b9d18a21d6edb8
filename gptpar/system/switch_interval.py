"""Python's switch interval: how long a thread may keep the interpreter to itself while others wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_SECONDS = 5e-5
"""The interpreter's switch interval while a thread of ours shares the interpreter with the training loop."""


class SwitchInterval:
    """Shortens the interval while anybody wants that, and restores the original one after the last :meth:`restore`.

    The interval belongs to the process, so one object owns it: :data:`SWITCH_INTERVAL`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[float] = []
        self._before = 0.0

    def shorten(self, seconds: float) -> None:
        """Let no thread keep Python's lock for longer than ``seconds``, until a :meth:`restore` of the same number."""
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
            self._wanted.append(seconds)
            sys.setswitchinterval(min(self._before, *self._wanted))

    def restore(self, seconds: float) -> None:
        """Take back one :meth:`shorten`."""
        with self._lock:
            self._wanted.remove(seconds)
            sys.setswitchinterval(min([self._before, *self._wanted]))

    @contextmanager
    def short(self) -> Iterator[None]:
        """A context for much work in Python beside a training loop, whose threads need the lock often and briefly.

        Where each waits a millisecond for the lock, planning a save of 1.3B with everything on the CPU cost a step of
        300 ms another 50.
        """
        self.shorten(SHORT_SECONDS)
        try:
            yield
        finally:
            self.restore(SHORT_SECONDS)

    @contextmanager
    def long_again(self) -> Iterator[None]:
        """A context inside :meth:`short` for work outside of Python, which would often interrupt the loop."""
        self.restore(SHORT_SECONDS)
        try:
            yield
        finally:
            self.shorten(SHORT_SECONDS)


SWITCH_INTERVAL = SwitchInterval()
