"""Tensors as streams of small pieces, to and from files: a checkpoint never needs a second copy in memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gptpar.checkpoint.manifest import PIECE_BYTES, Chunk, DamagedCheckpoint

NUM_THREADS = 4


def tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's row-major bytes in pieces of at most `PIECE_BYTES`; each is valid until the next.

    Host tensors are not copied unless a piece is not contiguous; other devices go through two host buffers.
    """
    for block in _blocks(tensor.detach()):
        # as_strided: a contiguous tensor of one element may still have any stride, and view(dtype) minds it.
        flat = block.contiguous().as_strided((block.numel(),), (1,))
        parts = flat.view(torch.uint8).split(PIECE_BYTES) if block.numel() else ()
        if block.device.type == "cpu":
            yield from (part.numpy().data for part in parts)
        else:
            yield from _staged(parts)


def write_chunk(fd: int, start: int, tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Write the tensor's bytes at `start`; returns (bytes, CRC-32) of each piece."""
    pieces = []
    for piece in tensor_pieces(tensor):
        pieces.append((len(piece), zlib.crc32(piece)))
        written = 0
        while written < len(piece):
            written += os.pwrite(fd, piece[written:], start + written)
        start += len(piece)
    return tuple(pieces)


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


def run_parallel(calls: list[Any]) -> list[Any]:
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


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Consecutive parts of the tensor that are contiguous, or so small that copying them costs nothing."""
    if tensor.is_contiguous() or tensor.nbytes <= PIECE_BYTES:
        yield tensor
        return
    rows = PIECE_BYTES // tensor[0].nbytes
    if rows:
        yield from tensor.split(rows)
        return
    for row in tensor:
        yield from _blocks(row)


def _staged(parts: tuple[torch.Tensor, ...]) -> Iterator[memoryview]:
    """Device pieces through two host buffers in turn: the next copy runs while the last piece is written."""
    pinned = parts[0].device.type == "cuda" if parts else False
    buffers = [torch.empty(part.numel(), dtype=torch.uint8, pin_memory=pinned) for part in parts[:2]]

    def send(index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        part = parts[index]
        host = buffers[index % 2][: part.numel()]
        host.copy_(part, non_blocking=pinned)
        if not pinned:
            return host, None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(part.device))
        return host, done

    coming = send(0) if parts else None
    for index in range(len(parts)):
        assert coming is not None
        host, done = coming
        coming = send(index + 1) if index + 1 < len(parts) else None
        if done is not None:
            done.synchronize()
        yield host.numpy().data
