"""A file of records that a full disk can neither cut in the middle of one nor leave with a hole."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from pathlib import Path

MAX_WAITING_BYTES = 64 << 20


class RecordFile:
    """Grows by whole records. What the disk refuses waits in memory until a later :meth:`flush` succeeds.

    Args:
        path: appended to; made where missing, with its folder.
        header: begins a file that is new.
        queue_size: records kept in memory before they are written.
        flush_seconds: how long they are kept at most, as far as further records come.
    """

    def __init__(self, path: Path, *, header: bytes = b"", queue_size: int = 1, flush_seconds: float = math.inf):
        self._path, self._header = path, header
        self._queue_size, self._flush_seconds = queue_size, flush_seconds
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0
        self._fails = False
        self._fd: int | None = None
        self._open()

    def append(self, record: bytes) -> None:
        """Add a record; after a failure it only waits, for :meth:`flush` is to be tried again at a time of choice.

        Raises:
            OSError: what waits could not be written, or is more than memory is spent on.
        """
        if self._num_waiting_bytes + len(record) > MAX_WAITING_BYTES:
            raise OSError(errno.ENOBUFS, f"more than {MAX_WAITING_BYTES >> 20} MiB wait to be written")
        self._waiting.append(record)
        self._num_waiting_bytes += len(record)
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
                if not self._fails:  # to be told before a new file takes its place
                    raise OSError(errno.ENOENT, "it was removed, with what it held")
                self._release()
                self._open()
            self._write(b"".join(self._waiting))
        except OSError:
            self._fails = True
            raise
        self._waiting.clear()
        self._num_waiting_bytes = 0
        self._fails = False

    def close(self) -> None:
        """Write what waits and let go of the file."""
        try:
            self.flush()
        finally:
            self._release()

    def _is_gone(self) -> bool:
        try:
            return self._fd is None or os.fstat(self._fd).st_nlink == 0
        except OSError:  # a network's stale handle
            return True

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._fd).st_size
        self._flushed = time.monotonic()
        if self._end == 0:
            self._write(self._header)

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
