"""Passes signals on to the workers, and decides how long the launcher waits before it kills them.

It kills workers only if they show no sign of life, or after a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.program import Program
from gptpar.errors import GptparError
from gptpar.system.activity import START, SignsOfLife, all_activities
from gptpar.system.processes import children
from gptpar.system.restart import was_stopped
from gptpar.system.stop import AT_ONCE_SECONDS, SAME_REQUEST_SECONDS, Stopped, handling

PATIENCE_VARIABLE = "GPTPAR_STOP_SECONDS"
PATIENCE_SECONDS = 1800.0
"""Time for which workers that were asked to stop may show no sign of life: a note, bytes read or written.

A worker that waits for another ends by itself after --distributed-timeout-minutes."""

START_SECONDS = 30.0
"""Time for which workers may be silent in their first start-up, in which they have nothing to save."""

GRACE_SECONDS = 5.0
"""Beyond the time after which a worker ends itself."""

POLL_SECONDS = 0.5
NOTHING_LOST = " before there was anything to save"


def patience() -> float:
    """Seconds without a sign of life after which workers that were asked to stop are killed, as the user sets them.

    Raises:
        GptparError: it is no number.
    """
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise GptparError(f"{PATIENCE_VARIABLE}={text} is not a number of seconds: correct it, or unset it.") from None


def print_message(message: str) -> None:
    """Print a message on stderr, if it is still there."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)


class Workers(Protocol):
    """Starts and watches the workers.

    Attributes:
        holds: whether there is something to save although no worker may live just now: a request to stop then waits for
            the next workers.
    """

    holds: bool

    def living(self) -> set[int]:
        """Process ids of the live workers."""
        ...

    def listening(self) -> set[int]:
        """Process ids of the workers that can take a request now."""
        ...


class Children:
    """Workers that torchrun starts in this process: all children of the process, from their first moment on."""

    holds = False

    def living(self) -> set[int]:
        return children(os.getpid())

    listening = living


class Relay:
    """Passes requests to stop on to the workers.

    Args:
        folder: of the workers' records of activity.
        patience: seconds without a sign of life.
        program: what the workers run.

    Attributes:
        signal: the first request.
    """

    def __init__(self, folder: Path, patience: float, workers: Workers, program: Program):
        self._folder, self._patience, self._workers, self._program = folder, patience, workers, program
        self.signal: signal.Signals | None = None
        self._when = 0.0
        self._at_once: float | None = None
        self._killed = ""
        self._told: set[int] = set()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    @contextlib.contextmanager
    def relaying(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        try:
            with handling(self._pass_on):
                yield
        finally:
            self._ended.set()

    @property
    def kills(self) -> bool:
        """Whether workers no longer get the time to save."""
        return bool(self._killed) or self._at_once is not None

    def exit_code(self, failure: Failure | None) -> int:
        """The launcher's exit code; prints how the run ended if no worker has said so.

        Args:
            failure: of the worker that failed first.
        """
        asked = self.signal
        if failure is None and asked is None and was_stopped(self._folder):
            print_message("stopped by a request to another launcher of this run, or to a worker")
            return 128 + signal.SIGTERM
        if failure is None:
            return 0 if asked is None else 128 + asked
        if asked is None:
            print_message(f"error: {failure}")
            return failure.exit_code
        if self._killed:
            print_message(
                f"error: stopped by {asked.name}, and the workers were killed, with what they learnt since the last "
                f"checkpoint: {self._killed}"
            )
        elif self._at_once is not None:
            print_message("error: interrupted twice: stopped at once, without saving")
        elif failure.doing == START and self._is_answer(failure, asked):
            # Other programs than gptpar's may note nothing to their end, whatever they have learnt.
            print_message(f"stopped by {asked.name}{NOTHING_LOST if self._program.is_gptpar else ''}")
        else:
            print_message(f"error: stopped by {asked.name}, but {failure}")
            return failure.exit_code
        return 128 + (asked if self._at_once is None else signal.SIGINT)

    def _is_answer(self, failure: Failure, asked: signal.Signals) -> bool:
        """Whether a worker that ended in its start-up did so because of the request.

        Python ends with 1, or by another signal, if Ctrl-C comes before it has read its first module.
        """
        return failure.code in (-asked, 128 + asked) or (self._program.is_gptpar and not failure.final)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._when = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._when > SAME_REQUEST_SECONDS:
            self._at_once = self._at_once or time.monotonic()
        workers = self._workers.listening()
        if not workers and not self._workers.holds:
            raise Stopped(number)
        send(workers, number)
        self._told |= workers
        if not self._watcher.is_alive() and not self._ended.is_set():
            self._watcher.start()

    def _watch(self) -> None:
        """Watch the workers from the first request on, in a thread: the main thread waits for the workers' end."""
        assert self.signal is not None
        signs = SignsOfLife(self._folder)
        while not self._ended.wait(POLL_SECONDS):
            workers, now = self._workers.living(), time.monotonic()
            new = self._workers.listening() - self._told  # started while the request came
            send(new, self.signal)
            self._told |= new
            places = set(all_activities(self._folder).values())
            silent = signs.silence(workers)
            is_early = places <= {START} and not self._workers.holds
            patience = min(START_SECONDS, self._patience) if is_early else self._patience
            if self._at_once is not None and now - self._at_once > AT_ONCE_SECONDS + GRACE_SECONDS:
                self._kill(workers, "a second Ctrl-C did not end them")
            elif silent > patience:
                self._kill(workers, f"no sign of life for {patience:g} s at {'; '.join(sorted(places)) or START}")

    def _kill(self, workers: set[int], reason: str) -> None:
        self._killed = self._killed or reason
        send(workers, signal.SIGKILL)


def send(processes: set[int], number: int) -> None:
    """Send a signal to the processes that still live."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
