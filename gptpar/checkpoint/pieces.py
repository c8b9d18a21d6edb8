"""Reads the pieces of a checkpoint's data files, and runs calls in a few threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from gptpar.checkpoint.data_file import AlignedBuffers, SourceFile
from gptpar.checkpoint.manifest import Chunk, DamagedCheckpoint

NUM_THREADS = 4

T = TypeVar("T")


class ChunkFiles:
    """The data files of one checkpoint, safe to read from several threads once :meth:`open` has opened them.

    Args:
        from_disk: drop the system's cached copies first: what is read is then what the disk holds.
        past_cache: see :class:`~gptpar.checkpoint.data_file.SourceFile`.
        threads: how many read at once.
    """

    def __init__(self, path: Path, *, from_disk: bool = False, past_cache: bool = False, threads: int = NUM_THREADS):
        self._path = path
        self._from_disk, self._past_cache = from_disk, past_cache
        self._files: dict[str, SourceFile] = {}
        # One buffer per thread for good: allocators keep what short-lived ones leave behind, per thread.
        self._buffers = AlignedBuffers(threads)

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def open(self, names: set[str]) -> None:
        for name in sorted(names - self._files.keys()):
            try:
                self._files[name] = file = SourceFile(self._path / name, past_cache=self._past_cache)
            except OSError as error:
                raise DamagedCheckpoint(f"{self._path / name} cannot be opened: {error.strerror}") from None
            if self._from_disk:
                file.drop_cached()

    @contextmanager
    def read(self, tensor_name: str, chunk: Chunk, index: int, itemsize: int = 1) -> Iterator[torch.Tensor]:
        """Piece `index` of a chunk (uint8, host), proved by its CRC-32, in one of the threads' buffers.

        Raises:
            DamagedCheckpoint: naming file, tensor and bytes.
        """
        length, crc = chunk.pieces[index]
        start = chunk.start + sum(size for size, _ in chunk.pieces[:index])
        where = f"{self._path / chunk.file}: tensor {tensor_name!r}, bytes {start}..{start + length}"
        with self._buffers.take(start, length, itemsize) as piece:
            try:
                done, found = self._files[chunk.file].read_with_crc32(start, piece)
            except OSError as error:
                raise DamagedCheckpoint(f"{where}: cannot be read: {error.strerror}") from None
            if done < length:
                raise DamagedCheckpoint(f"{where}: the file ends at byte {start + done}")
            if found != crc:
                raise DamagedCheckpoint(f"{where}: damaged, CRC-32 is {found:08x} and was {crc:08x} when saved")
            yield piece


def pieces_of(chunk: Chunk, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Number, first element and the one after the last of each piece of a chunk."""
    start = 0
    for index, (length, _) in enumerate(chunk.pieces):
        stop = start + length // itemsize
        yield index, start, stop
        start = stop


def run_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, run by a few threads; after an error the calls not yet begun are dropped.

    A future for each call would take Python's lock several times more often from a training loop beside it.
    """
    left = iter(list(enumerate(calls)))  # shared: each thread takes the next one
    results: dict[int, T] = {}

    def work() -> None:
        for number, call in left:
            results[number] = call()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            for future in as_completed([pool.submit(work) for _ in range(NUM_THREADS)]):
                future.result()
        except BaseException:
            deque(left, maxlen=0)
            raise
    return [results[number] for number in range(len(calls))]
