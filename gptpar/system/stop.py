"""Receives the signals that ask a run to stop: an exception before training, a note during training."""

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
"""Signals of schedulers, Ctrl-C, a closed terminal or lost connection, and Slurm's warnings before a time limit."""

SAME_REQUEST_SECONDS = 1.0
"""Within this time a second Ctrl-C is the same one: it may reach a worker directly and through its launcher."""

AT_ONCE_SECONDS = 5.0
"""After a second Ctrl-C the process has this long to remove unfinished files; then it ends."""


class Stopped(BaseException):
    """A signal ended a process that has nothing to save.

    It is no ``Exception``, so that no handler of failures catches it and goes on.

    Attributes:
        signal: the signal that came.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """A signal handler that raises an exception, on whose way temporary files are removed."""
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Let ``handler`` answer the signals inside the block; does nothing outside of the main thread.

    A SIGHUP that the process ignores stays ignored: nohup does that.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in numbers}
    if previous.get(signal.SIGHUP) == signal.SIG_IGN:
        del previous[signal.SIGHUP]
    # None: a handler that is not Python's, such as faulthandler's, and could not be restored.
    previous = {number: before for number, before in previous.items() if before is not None}
    try:
        for number in previous:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopAtOnce:
    """The handler of a whole command, which calls :func:`stop_at_once`.

    Args:
        ends_with_run: the process does nothing after its :class:`StopRequest` but end. Signals are ignored then: a
            request that has stopped the run by another worker would make a failure of this one, which has saved.

    Attributes:
        signal: the first one that came.
    """

    def __init__(self, ends_with_run: bool):
        self.signal: int | None = None
        self._ends_with_run, self._is_over = ends_with_run, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_over:
            self.signal = self.signal or number
            stop_at_once(number, frame)

    def run_is_over(self) -> None:
        """The block of :meth:`StopRequest.listening` has ended well."""
        self._is_over = self._ends_with_run


class StopRequest:
    """Notes that a signal asked the run to stop. A later Ctrl-C stops it at once, without saving.

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
        """Handle the signals inside the block; until :meth:`hold` they raise an exception."""
        of_command = signal.getsignal(signal.SIGTERM)
        try:
            with handling(self._note):
                yield self
                if isinstance(of_command, StopAtOnce):
                    of_command.run_is_over()
        except Exception:
            self._end_if_asked()  # an extension module that was being imported has made another one of the exception
            raise
        finally:
            if self._end is not None:
                self._end.cancel()

    def hold(self) -> None:
        """Note signals from now on, instead of raising exceptions: there is something to save."""
        self._end_if_asked()  # other code has caught the exception
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
    """End the process at once: Python would wait for a thread that hangs in a system call."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(f"error: interrupted; a write did not end within {AT_ONCE_SECONDS:g} s", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
