"""Reads tensors of a checkpoint piece by piece: where each piece lies in its tensor, and then its elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gptpar.checkpoint.manifest import Chunk, DamagedCheckpoint, Manifest
from gptpar.checkpoint.patches import boxes_of
from gptpar.checkpoint.pieces import ChunkFiles, pieces_of
from gptpar.checkpoint.verify import damaged_files
from gptpar.topology.tensor_parts import Box, flat_boxes


@dataclass(frozen=True)
class TensorPiece:
    """A piece of a tensor of a checkpoint.

    Attributes:
        name: of the tensor.
        index: number of the piece in its chunk.
        start, stop: its elements, counted in the chunk.
    """

    name: str
    chunk: Chunk
    index: int
    start: int
    stop: int

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the tensor that the piece holds."""
        return [_moved(box, self.chunk) for box in flat_boxes(self.chunk.sizes, self.start, self.stop)]


class PieceReader:
    """Reads a checkpoint in several threads, past the system's cache; used in a ``with`` statement.

    Args:
        path: of the checkpoint.
        names: of the tensors that will be read.
        threads: how many read at once.

    Raises:
        DamagedCheckpoint: a file is missing or too short.
    """

    def __init__(self, path: Path, manifest: Manifest, names: Iterable[str], threads: int):
        if problems := damaged_files(path, manifest):
            raise DamagedCheckpoint("\n".join(problems))
        self._manifest, self._files = manifest, ChunkFiles(path, past_cache=True, threads=threads)
        self._opened = {chunk.file for name in names for chunk in manifest.tensors[name].chunks if chunk.pieces}

    def __enter__(self) -> PieceReader:
        self._files.open(self._opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def pieces(self, name: str) -> list[TensorPiece]:
        """A tensor's pieces, by where they begin in the tensor."""
        entry = self._manifest.tensors[name]
        found = [
            TensorPiece(name, chunk, *one) for chunk in entry.chunks for one in pieces_of(chunk, entry.dtype.itemsize)
        ]
        return sorted(found, key=lambda piece: piece.boxes[0][0])

    @contextmanager
    def read(self, piece: TensorPiece) -> Iterator[list[tuple[Box, torch.Tensor]]]:
        """The boxes of a piece with their elements, in the memory of a thread.

        Raises:
            DamagedCheckpoint: naming file, tensor and bytes.
        """
        dtype = self._manifest.tensors[piece.name].dtype
        with self._files.read(piece.name, piece.chunk, piece.index, dtype.itemsize) as read:
            parts = boxes_of(piece.chunk.sizes, piece.start, read.view(dtype))
            yield [(_moved(box, piece.chunk), values) for box, values in parts]


def _moved(box: Box, chunk: Chunk) -> Box:
    """A box of a chunk, as one of the tensor."""
    return tuple(low + offset for low, offset in zip(box[0], chunk.offsets, strict=True)), box[1]
