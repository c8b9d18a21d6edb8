"""Writes a checkpoint's data file from several threads, past the system's cache where the file system allows it.

Through the cache, the disk would rest until much is dirty, and the last flush would take as long as all writes. Direct
writes take whole blocks of the disk only; the bytes before a piece's first and after its last whole block go through
the cache. So a file has no gaps, and a block is written in one of the two ways alone.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import torch

from gptpar.errors import CheckpointError
from gptpar.system.snapshot import PIECE_BYTES

BLOCK_BYTES = max(4096, mmap.PAGESIZE)
"""Addresses, lengths and places of direct writes are multiples of this. No page of the cache has bytes of both ways."""

MIN_DIRECT_BYTES = 256 << 10


class WritingBuffers:
    """Room for a piece each, for several threads: the pieces that are being written just now.

    Args:
        pinned: whether a GPU copies into them.
    """

    def __init__(self, number: int, *, pinned: bool):
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(number):
            memory = torch.empty(PIECE_BYTES + 2 * BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
            self._free.put(memory[-memory.data_ptr() % BLOCK_BYTES :])

    @contextmanager
    def take(self, place: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """[num_bytes] of uint8 for what will be written at ``place`` of a file: aligned in memory as it is there."""
        buffer = self._free.get()
        try:
            first = place % BLOCK_BYTES
            yield buffer[first : first + num_bytes]
        finally:
            self._free.put(buffer)


class DataFile:
    """A new file, which several threads write to at once.

    Raises:
        CheckpointError: by all methods, where the system refuses.
    """

    def __init__(self, path: Path):
        self._path, self._direct = path, -1
        with self._explained():
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without direct writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def write(self, place: int, data: memoryview) -> None:
        """Write all of ``data``, of a buffer of :class:`WritingBuffers`, at ``place``."""
        first, last = -place % BLOCK_BYTES, (place + len(data)) // BLOCK_BYTES * BLOCK_BYTES - place
        with self._explained():
            if self._direct < 0 or last - first < MIN_DIRECT_BYTES:
                _write_all(self._fd, data, place)
                return
            for fd, start, stop in ((self._fd, 0, first), (self._direct, first, last), (self._fd, last, len(data))):
                if start < stop:
                    self._write_part(fd, data[start:stop], place + start)

    def _write_part(self, fd: int, data: memoryview, place: int) -> None:
        try:
            _write_all(fd, data, place)
        except OSError as error:
            if fd != self._direct or error.errno != errno.EINVAL:
                raise
            _write_all(self._fd, data, place)  # larger blocks than ours, or a short write that ended amid one

    def sync(self) -> None:
        """Return when all is on the disk."""
        with self._explained():
            os.fsync(self._fd)

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from error


def _write_all(fd: int, data: memoryview, place: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], place + written)
