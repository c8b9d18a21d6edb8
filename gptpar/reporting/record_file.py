"""Writes a file of records in which a full disk leaves neither half a record nor a gap."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

MAX_WAITING_BYTES = 64 << 20
"""Bytes of records that wait at most for a file that cannot be written; further ones are dropped."""


class RecordDropped(OSError):
    """A record was dropped, because too many others wait to be written."""


class RecordFile:
    """A file that grows by whole records. Records that cannot be written wait in memory until a :meth:`flush` succeeds.

    Args:
        path: the file's path; if missing, it is made at the first flush, with its folder.
        prepare: prepares an existing file before it is first opened; if this fails, the next flush calls it again.
        header: the beginning of a new file.
        queue_size: number of records that are kept in memory before they are written.
        flush_seconds: the longest time that they are kept, if further records arrive.

    State: ``_waiting`` holds the records that are not in the file, in order, and ``_num_waiting_bytes`` is their size.
    ``_fails`` says whether the last write failed; then only :meth:`flush` writes. The file behind ``_fd`` (``None``:
    not open) has ``_end`` bytes, all of them whole records. ``_flushed`` is the time of the last attempt to write.
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
        """Add records. After a failure they only wait: the caller decides when to try :meth:`flush` again.

        Raises:
            RecordDropped: the waiting records would take too much memory; none of the new ones was added.
            OSError: the waiting records could not be written.
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
        """Write the waiting records.

        Raises:
            OSError: not all could be written; the file ends with a whole record, and all records still wait.
        """
        self._flushed = time.monotonic()
        try:
            if self._is_gone():
                self._release()
                if not self._fails:  # report it before a new file is made
                    raise OSError(errno.ENOENT, "it was removed, with what it held")
            if self._fd is None:
                if self._prepare is not None:
                    self._prepare()
                    self._prepare = None
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._end = os.fstat(self._fd).st_size
            self._write(b"".join([b"" if self._end else self._header, *self._waiting]))
        except OSError:
            self._fails = True
            raise
        self._waiting.clear()
        self._num_waiting_bytes = 0
        self._fails = False

    def close(self) -> None:
        """Write the waiting records and close the file.

        Raises:
            OSError: see :meth:`flush`; also if the file was removed, even if a new one now holds what waited.
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
