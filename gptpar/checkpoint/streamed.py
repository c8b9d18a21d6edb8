"""Writes a checkpoint tensor by tensor from one process: the result of a conversion."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import folders
from gptpar.checkpoint.data_file import AlignedBuffers, DataFile
from gptpar.checkpoint.manifest import MANIFEST_NAME, Chunk, Manifest, TensorEntry
from gptpar.checkpoint.pieces import NUM_THREADS, run_parallel
from gptpar.errors import CheckpointError
from gptpar.system.files import write_synced
from gptpar.system.snapshot import PIECE_BYTES

_FILE = "rank00000.bin"


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is made when its turn comes.

    Attributes:
        make: returns it; its memory is let go before the next one is made.
    """

    name: str
    make: Callable[[], torch.Tensor]


def write_checkpoint(root: Path, iteration: int, tensors: Iterable[StreamedTensor], meta: dict[str, Any]) -> Path:
    """Write ``root/iter_...``; it appears whole or not at all.

    Args:
        meta: as ``save_checkpoint`` takes it.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: there is a checkpoint of this iteration, or the disk refuses.
    """
    final = folders.checkpoint_path(root, iteration)
    if final.exists():
        raise CheckpointError(f"{final} is there already and is not overwritten; choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    temporary = folders.temporary_path(root, iteration)
    temporary.mkdir()
    try:
        entries = _write(temporary / _FILE, tensors)
        write_synced(temporary / MANIFEST_NAME, Manifest(iteration, entries, meta).to_json())
        folders.publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    folders.write_hint(root, iteration)
    return final


def _write(path: Path, tensors: Iterable[StreamedTensor]) -> dict[str, TensorEntry]:
    file, buffers, place = DataFile(path), AlignedBuffers(NUM_THREADS, pinned=False), 0
    entries: dict[str, TensorEntry] = {}
    try:
        for one in tensors:
            entries[one.name] = entry = _write_tensor(file, buffers, one.make(), place)
            place += entry.nbytes
        file.sync()
    finally:
        file.close()
    return entries


def _write_tensor(file: DataFile, buffers: AlignedBuffers, tensor: torch.Tensor, place: int) -> TensorEntry:
    data, shape = tensor.contiguous().view(-1).view(torch.uint8), tuple(tensor.shape)
    cuts = range(0, len(data), PIECE_BYTES)
    calls = [partial(_write_piece, file, buffers, data[at : at + PIECE_BYTES], place + at) for at in cuts]
    chunk = Chunk((0,) * len(shape), shape, _FILE, place, tuple(run_parallel(calls)))
    return TensorEntry(tensor.dtype, shape, (chunk,))


def _write_piece(file: DataFile, buffers: AlignedBuffers, data: torch.Tensor, place: int) -> tuple[int, int]:
    """Write a piece; returns its length and its CRC-32."""
    with buffers.take(place, len(data)) as buffer:
        buffer.copy_(data)
        view = buffer.numpy().data
        file.write(place, view)
        return len(data), zlib.crc32(view)
