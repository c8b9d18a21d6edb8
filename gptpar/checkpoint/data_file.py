"""Reads and writes files from several threads, past the system's cache where the file system allows it.

Through the cache, the disk would rest until much is dirty, and the last flush would take as long as all writes. Direct
writes take whole blocks of the disk only; the bytes before a piece's first and after its last whole block go through
the cache. So a file has no gaps, and a block is written in one of the two ways alone.

A write through the cache waits for the direct writes to the same file, and holds up the next ones: on one machine the
few of a save (20 of 15,790 MB) took a fifth of its time. So these bytes are collected, and written many at a time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from gptpar.errors import CheckpointError
from gptpar.system import pages
from gptpar.system.crc32 import copy_with_crc32, crc32, read_with_crc32
from gptpar.system.files import open_regular
from gptpar.system.snapshot import PIECE_BYTES

BLOCK_BYTES = max(4096, mmap.PAGESIZE)
"""Addresses, lengths and places of direct writes are multiples of this, so that no page also has bytes that were
written through the cache."""

MIN_DIRECT_BYTES = 256 << 10

CACHED_BYTES = 256 << 10
"""Bytes that are read from the system's cache before their CRC-32 is computed: they fit a core's own cache."""

MAX_COLLECTED_BYTES = 4 << 20
"""Bytes for the system's cache that are collected before they are written."""

BUFFER_BYTES = PIECE_BYTES + 3 * BLOCK_BYTES
"""Memory for a piece, wherever it begins in a block of the disk."""


class AlignedBuffers:
    """Memory for the pieces that several threads read or write at one time, one piece each.

    Args:
        pinned: whether a GPU copies into them.
    """

    def __init__(self, number: int, *, pinned: bool = False):
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(number):
            self._free.put(aligned_memory(pinned=pinned))

    @contextmanager
    def take(self, place: int, num_bytes: int, itemsize: int = 1) -> Iterator[torch.Tensor]:
        """[num_bytes] of uint8 for the bytes at ``place`` of a file; see :func:`aligned_as`."""
        buffer = self._free.get()
        try:
            yield aligned_as(buffer, place, num_bytes, itemsize)
        finally:
            self._free.put(buffer)


def aligned_memory(*, pinned: bool = False) -> torch.Tensor:
    """Memory for a piece and the rest of its first and last block, aligned to a block.

    In huge pages a direct write has fewer and larger segments.
    """
    if not pinned:
        return pages.untouched(BUFFER_BYTES)
    memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    return memory[-memory.data_ptr() % BLOCK_BYTES :]


def aligned_as(memory: torch.Tensor, place: int, num_bytes: int, itemsize: int) -> torch.Tensor:
    """The part of aligned memory for the bytes at a place of a file, aligned to blocks as in the file.

    Args:
        itemsize: bytes of an element; the elements are aligned in memory even where they are not in the file.
    """
    first = place % BLOCK_BYTES // itemsize * itemsize
    return memory[first : first + num_bytes]


def piece_starts(place: int, num_elements: int, itemsize: int) -> list[int]:
    """The first element of each part of a tensor that is read or written at once.

    Parts begin where the file's pieces of 8 MiB do, so that whole blocks of the disk are read or written.

    Args:
        place: of the tensor's bytes in the file.
    """
    whole = range(place - place % PIECE_BYTES + PIECE_BYTES, place + num_elements * itemsize, PIECE_BYTES)
    starts = dict.fromkeys([0, *((at - place) // itemsize for at in whole)])
    return [start for start in starts if start < num_elements]


class SourceFile:
    """A file that several threads read at once.

    Args:
        past_cache: read from the disk what the system's cache does not have, and do not put it there. The processor
            works less. It is of use where no other process reads the same file.

    Raises:
        OSError: by all methods, where the system refuses.
    """

    def __init__(self, path: Path, *, past_cache: bool = False):
        with open_regular(path) as file:
            self._fd, self._direct = os.dup(file.fileno()), -1
        if past_cache and hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT"):
            with suppress(OSError):  # a file system without direct reads
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def drop_cached(self) -> None:
        """Let the system forget its copy of the file, so that what is read next is what the disk holds."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, place: int, target: torch.Tensor) -> int:
        """Fill ``target`` [bytes], uint8, with the bytes at ``place``; returns their number, fewer at the file's end.

        Args:
            target: is filled past the cache only if it was made by :func:`aligned_as`.
        """
        view, done = target.numpy().data, self._read_past_cache(place, target)
        while done < len(view) and (count := os.preadv(self._fd, [view[done:]], place + done)):
            done += count
        return done

    def read_with_crc32(self, place: int, target: torch.Tensor) -> tuple[int, int]:
        """Read like :meth:`read`; returns the number of bytes, and their CRC-32."""
        done = self._read_past_cache(place, target)
        crc, left = crc32(target[:done]), target[done:]
        part = CACHED_BYTES if not done and self._is_cached(place) else max(1, len(left))
        count, crc = read_with_crc32(self._fd, place + done, left, crc, part)
        return done + count, crc

    def _is_cached(self, place: int) -> bool:
        """Whether the system's cache has the byte at ``place``, and so probably what follows."""
        try:
            return os.preadv(self._fd, [bytearray(1)], place, os.RWF_NOWAIT) == 1
        except OSError:  # it has not, or the file system cannot tell
            return False

    def _read_past_cache(self, place: int, target: torch.Tensor) -> int:
        """Read whole blocks of the disk around the bytes; returns the number of bytes.

        It is 0 if the system refuses, or has the bytes in its cache.
        """
        if self._direct < 0 or (target.data_ptr() - place) % BLOCK_BYTES or self._is_cached(place):
            return 0
        first = place % BLOCK_BYTES
        length = -(-(first + len(target)) // BLOCK_BYTES) * BLOCK_BYTES
        blocks = target.as_strided((length,), (1,), target.storage_offset() - first)
        try:
            return min(len(target), max(0, os.preadv(self._direct, [blocks.numpy().data], place - first) - first))
        except OSError:
            return 0

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)


class DataFile:
    """A new file, which several threads write to at once; all bytes are in it after :meth:`sync`.

    Args:
        moved: is called after each piece (:meth:`write_piece`).

    Raises:
        CheckpointError: by all methods, where the system refuses.
    """

    def __init__(self, path: Path, moved: Callable[[], None] = lambda: None):
        self._path, self._direct, self._moved = path, -1, moved
        self._collected: list[tuple[int, bytes]] = []  # (place, bytes) for the cache
        self._num_collected, self._lock = 0, threading.Lock()
        with self._explained():
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without direct writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def reserve(self, place: int, num_bytes: int) -> None:
        """Reserve these bytes on the disk before they are written.

        A full disk is found now. Direct writes run in parallel, because the file has its blocks already.
        """
        with self._explained():
            reserve_disk(self._fd, place, num_bytes)

    def write_piece(
        self, buffers: AlignedBuffers, read: Callable[[Callable[[torch.Tensor], int]], int], place: int, num_bytes: int
    ) -> int:
        """Write a piece at ``place``; returns its CRC-32.

        Args:
            read: calls its argument with the piece, and returns its result; the piece may be overwritten from then on.
        """
        with buffers.take(place, num_bytes) as buffer:
            crc = read(partial(copy_with_crc32, buffer))
            self.write(place, buffer.numpy().data)
        self._moved()
        return crc

    def write(self, place: int, data: memoryview) -> None:
        """Write all of ``data``, of a buffer of :class:`AlignedBuffers`, at ``place``."""
        first, last = -place % BLOCK_BYTES, (place + len(data)) // BLOCK_BYTES * BLOCK_BYTES - place
        with self._explained():
            if self._direct < 0:
                _write_all(self._fd, data, place)
            elif last - first < MIN_DIRECT_BYTES:
                self._collect((place, data))
            else:
                self._write_blocks(data[first:last], place + first)
                self._collect((place, data[:first]), (place + last, data[last:]))

    def _write_blocks(self, data: memoryview, place: int) -> None:
        try:
            _write_all(self._direct, data, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_all(self._fd, data, place)  # larger blocks than ours, or a short write that ended amid one

    def _collect(self, *parts: tuple[int, memoryview]) -> None:
        """Take a copy of bytes that go through the cache."""
        with self._lock:
            for place, data in parts:
                if data:
                    self._collected.append((place, bytes(data)))
                    self._num_collected += len(data)
            if self._num_collected > MAX_COLLECTED_BYTES:
                self._write_collected()

    def _write_collected(self) -> None:
        """Write the bytes collected, neighbours together; the caller holds the lock."""
        collected, self._collected, self._num_collected = sorted(self._collected), [], 0
        start = 0
        for number, (place, data) in enumerate(collected, 1):
            if number == len(collected) or collected[number][0] != place + len(data):
                together = b"".join(part for _, part in collected[start:number])
                _write_all(self._fd, memoryview(together), collected[start][0])
                start = number

    def sync(self) -> None:
        """Return when all is on the disk; no thread writes any more."""
        with self._explained():
            with self._lock:
                self._write_collected()
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


def reserve_disk(fd: int, place: int, num_bytes: int) -> None:
    """Give a file blocks of the disk; does nothing where the file system cannot.

    ``os.posix_fallocate`` would then write a byte to every block.

    Raises:
        OSError: the disk is too full, or the file exceeds the user's quota.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None or not num_bytes:
        return
    offset = ctypes.c_int64
    if fallocate(ctypes.c_int(fd), ctypes.c_int(0), offset(place), offset(num_bytes)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))
