"""Reads the pieces of a checkpoint's data files, and runs calls in a few threads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from gptpar.checkpoint.manifest import PIECE_BYTES, Chunk, DamagedCheckpoint

NUM_THREADS = 4

T = TypeVar("T")


class ChunkFiles:
    """The data files of one checkpoint, opened when first needed and safe to read from several threads."""

    def __init__(self, path: Path, *, from_disk: bool = False):
        """`from_disk` drops the system's cached copies first: what is read is then what the disk holds."""
        self._path = path
        self._from_disk = from_disk
        self._fds: dict[str, int] = {}
        # One buffer per thread for good: allocators keep what short-lived ones leave behind, per thread.
        self._buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(NUM_THREADS):
            self._buffers.put(torch.empty(PIECE_BYTES, dtype=torch.uint8))

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def open(self, names: set[str]) -> None:
        for name in sorted(names - self._fds.keys()):
            try:
                self._fds[name] = fd = os.open(self._path / name, os.O_RDONLY)
            except OSError as error:
                raise DamagedCheckpoint(f"{self._path / name} cannot be opened: {error.strerror}") from None
            if self._from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        """Room for one piece (uint8, host), for one of the threads of `run_parallel`."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def read(self, tensor_name: str, chunk: Chunk, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Piece `index` of a chunk as uint8 (a view of `buffer`), proved by its CRC-32.

        Raises:
            DamagedCheckpoint: naming file, tensor and bytes.
        """
        length, crc = chunk.pieces[index]
        start = chunk.start + sum(size for size, _ in chunk.pieces[:index])
        where = f"{self._path / chunk.file}: tensor {tensor_name!r}, bytes {start}..{start + length}"
        piece = buffer[:length]
        view, done = piece.numpy().data, 0
        while done < length:
            try:
                count = os.preadv(self._fds[chunk.file], [view[done:]], start + done)
            except OSError as error:
                raise DamagedCheckpoint(f"{where}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise DamagedCheckpoint(f"{where}: the file ends at byte {start + done}")
            done += count
        if (found := zlib.crc32(view)) != crc:
            raise DamagedCheckpoint(f"{where}: damaged, CRC-32 is {found:08x} and was {crc:08x} when saved")
        return piece


def run_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, run by a few threads; after an error the calls not yet begun are dropped."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def one_ahead(sizes: Mapping[str, int], read: Callable[[str], T], write: Callable[[str, T], None]) -> None:
    """Write what was read of each name, in order, and meanwhile read the next one.

    Both are in memory together only where they are not more than the largest one.

    Args:
        sizes: bytes that what is read takes.
    """
    names, room = list(sizes), max(sizes.values(), default=0)
    with ThreadPoolExecutor(1) as pool:
        ahead: Future[T] | None = None
        for name, following in zip_longest(names, names[1:]):
            value = read(name) if ahead is None else ahead.result()
            ahead = None
            if following is not None and sizes[name] + sizes[following] <= room:
                ahead = pool.submit(read, following)
            write(name, value)
            del value  # before the next one is read
