"""A file of records that a full disk can neither cut in the middle of one nor leave with a hole."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

MAX_WAITING_BYTES = 64 << 20


class RecordDropped(OSError):
    """A record that was not kept: too much waits already."""


class RecordFile:
    """Grows by whole records. What the disk refuses waits in memory until a later :meth:`flush` succeeds.

    Args:
        path: appended to; made at the first flush where missing, with its folder.
        prepare: puts in order what is at ``path``, before the file is first opened; tried again as writing is.
        header: begins a file that is new.
        queue_size: records kept in memory before they are written.
        flush_seconds: how long they are kept at most, as far as further records come.
    """

    def __init__(
        self,
        path: Path,
        *,
        prepare: Callable[[], None] | None = None,
        header: bytes = b"",
        queue_size: int = 1,
        flush_seconds: float = math.inf,
    ):
        self._path, self._prepare, self._header = path, prepare, header
        self._queue_size, self._flush_seconds = queue_size, flush_seconds
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0
        self._fails = False
        self._fd: int | None = None
        self._end = 0
        self._flushed = time.monotonic()

    def append(self, *records: bytes) -> None:
        """Add records; after a failure they only wait, for :meth:`flush` is to be tried again at a time of choice.

        Raises:
            RecordDropped: more would wait than memory is spent on; none of the records was added.
            OSError: what waits could not be written.
        """
        num_bytes = sum(map(len, records))
        if self._num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise RecordDropped(errno.ENOBUFS, f"more than {MAX_WAITING_BYTES >> 20} MiB wait to be written")
        self._waiting += records
        self._num_waiting_bytes += num_bytes
        late = time.monotonic() - self._flushed > self._flush_seconds
        if not self._fails and (late or len(self._waiting) >= self._queue_size):
            self.flush()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: not all could be written; the file ends with a whole record, and all waits on.
        """
        self._flushed = time.monotonic()
        try:
            if self._is_gone():
                self._release()
                if not self._fails:  # to be told before a new file takes its place
                    raise OSError(errno.ENOENT, "it was removed, with what it held")
            if self._fd is None:
                self._open()
            self._write(b"".join([b"" if self._end else self._header, *self._waiting]))
        except OSError:
            self._fails = True
            raise
        self._waiting.clear()
        self._num_waiting_bytes = 0
        self._fails = False

    def close(self) -> None:
        """Write what waits and let go of the file.

        Raises:
            OSError: as :meth:`flush`; of a file that was removed, even if what waited is in a new one now.
        """
        try:
            self.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self.flush()
            raise
        finally:
            self._release()

    def _is_gone(self) -> bool:
        try:
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        except OSError:  # a network's stale handle
            return True

    def _open(self) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._fd).st_size

    def _release(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
