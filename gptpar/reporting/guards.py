"""Guards a run against failures of its output: a full disk, a closed terminal, a dead service."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO, cast

from gptpar.errors import first_line
from gptpar.reporting.record_file import RecordDropped
from gptpar.reporting.records import IterationRecord, TaskRecord, ValidationRecord
from gptpar.reporting.sinks import Sink


def print_warning(sentence: str) -> None:
    """The default ``warn``: one line on stderr."""
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """An exception in few words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def _records(number: int) -> str:
    return "1 record" if number == 1 else f"{number} records"


class GuardedSink(Sink):
    """A sink whose failures do not reach the run: it warns once, tries again at each checkpoint, and warns at the end.

    It tries to write at once, so that a folder that cannot be written is reported before the first step.

    Args:
        sink: may raise any exception.
        warn: takes a sentence.
    """

    def __init__(self, sink: Sink, warn: Callable[[str], None] = print_warning):
        self.name, self.keeps_records = sink.name, sink.keeps_records
        self._sink, self._warn = sink, warn
        self._problem: str | None = None
        self._at = self._missing = 0
        self._attempt(sink.flush)

    def iteration(self, record: IterationRecord) -> None:
        self._record(partial(self._sink.iteration, record), record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        self._record(partial(self._sink.validation, record), record.iteration)

    def task(self, record: TaskRecord) -> None:
        self._record(partial(self._sink.task, record), record.iteration)

    def flush(self) -> None:
        """Try again to write: after a failure, the user may have made room."""
        failed_before = self._problem is not None
        if self._attempt(self._sink.flush) is None and failed_before:
            lacks = f"it lacks {_records(self._missing)}" if self._missing else "nothing is missing"
            self._warn(f"{self.name} is written again; {lacks} since then")
            self._problem, self._missing = None, 0

    def close(self) -> None:
        complete = self._attempt(self._sink.close) is None and self.keeps_records
        if self._problem is not None and not (complete and not self._missing):
            number = _records(self._missing) if complete else "records"
            self._warn(f"{self.name} lacks {number}, at first of iteration {self._at} ({self._problem})")

    def _record(self, write: Callable[[], None], iteration: int) -> None:
        if self._problem is None or not self._at:
            self._at = iteration
        error = self._attempt(write)
        is_lost = error is not None and (not self.keeps_records or isinstance(error, RecordDropped))
        if is_lost and self.keeps_records and not self._missing:
            self._at = iteration  # earlier records are kept and can still be written
        self._missing += is_lost

    def _attempt(self, action: Callable[[], None]) -> Exception | None:
        """Call ``action``; returns the exception that it raised, if any."""
        try:
            action()
        except Exception as error:  # a service's client may raise any exception
            first, self._problem = self._problem is None, reason(error)
            if first:
                place = f"iteration {self._at}" if self._at else "the start"
                self._warn(
                    f"{self.name} cannot be written at {place} ({self._problem}); the run goes on without it, and "
                    "tries again at each checkpoint"
                )
            return error
        return None


class GuardedStream:
    """A text stream that drops what cannot be written, because its reader is gone or its disk is full.

    Args:
        stream: stdout or stderr.
        name: the stream's name in messages.
        warn: takes a sentence, once.
    """

    def __init__(self, stream: TextIO, name: str, warn: Callable[[str], None]):
        self._stream, self._name, self._warn = stream, name, warn
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(partial(self._stream.write, text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def release(self) -> None:
        """End the stream. Otherwise Python would fail at exit over its buffered text, and change the exit code."""
        if self._failed:
            self._warn(f"{self._name} lacks lines of this run: it could not always be written")
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            if not self._failed:
                self._failed = True
                self._warn(f"{self._name} cannot be written ({reason(error)}); the run goes on without it")


@contextlib.contextmanager
def guarded_console() -> Iterator[None]:
    """Within the block no code that prints can fail because of stdout or stderr."""
    before = sys.stdout, sys.stderr

    def say(stream: TextIO, sentence: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"warning: {sentence}", file=stream, flush=True)

    out = GuardedStream(before[0], "stdout", partial(say, before[1]))
    err = GuardedStream(before[1], "stderr", partial(say, before[0]))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        out.release()
        err.release()
