"""Signals as a request to stop: at first by an exception, during training by a note that the loop reads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers, Ctrl-C, a closed terminal or lost ssh connection, and Slurm's usual warnings before a time limit."""

SAME_REQUEST_SECONDS = 1.0
"""A Ctrl-C may reach a worker twice, once directly and once through its launcher."""

AT_ONCE_SECONDS = 5.0
"""How long a second Ctrl-C leaves for removing what is unfinished, before the process ends without it."""


class Stopped(BaseException):
    """A signal ended what has nothing to save. No Exception: nobody may take it for a failure and go on.

    Attributes:
        signal: the signal that came.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """A signal handler: leave by an exception, which removes temporary files on its way."""
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Let ``handler`` answer the signals inside the block (in the main thread; elsewhere they are left alone).

    A SIGHUP that was ignored from the start stays so: nohup means it.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in numbers}
    if previous.get(signal.SIGHUP) == signal.SIG_IGN:
        del previous[signal.SIGHUP]
    # None: a handler that is not Python's and could not be put back, such as faulthandler's.
    previous = {number: before for number, before in previous.items() if before is not None}
    try:
        for number in previous:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopRequest:
    """Remembers that somebody asked the run to stop. Another Ctrl-C, later, stops at once and without saving.

    Attributes:
        signal: the first signal that came while there was something to save.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._holds = False
        self._ended_by: int | None = None
        self._when = 0.0
        self._end: threading.Timer | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals inside the block; until :meth:`hold` they end it by an exception."""
        try:
            with handling(self._note):
                yield self
        except Exception:
            self._end_if_asked()  # an extension module, while it was imported, made another error of the exception
            raise
        finally:
            if self._end is not None:
                self._end.cancel()

    def hold(self) -> None:
        """From now on there is something to save: signals are noted."""
        self._end_if_asked()  # somebody has caught the exception
        self._holds = True

    def _end_if_asked(self) -> None:
        if self._ended_by is not None and not self._holds:
            stop_at_once(self._ended_by, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._holds:
            self._ended_by = number
            stop_at_once(number, frame)
        elif self.signal is None:
            self.signal, self._when = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._when > SAME_REQUEST_SECONDS:
            if self._end is None:
                self._end = threading.Timer(AT_ONCE_SECONDS, _end_process)
                self._end.daemon = True
                self._end.start()
            raise KeyboardInterrupt


def _end_process() -> None:
    """A thread that hangs in a system call cannot be interrupted, and would be waited for."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(f"error: interrupted; a write did not end within {AT_ONCE_SECONDS:g} s", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
