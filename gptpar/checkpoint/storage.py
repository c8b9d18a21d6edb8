"""Writes each box of a tensor on one process that holds it, in pieces with CRC-32; fills tensors from proved pieces.

All ranks write together: rank 0 decides who writes which box (:func:`divide`), and makes the manifest.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gptpar.checkpoint.data_file import AlignedBuffers, DataFile
from gptpar.checkpoint.manifest import Chunk, Manifest, TensorEntry, file_of
from gptpar.checkpoint.pieces import NUM_THREADS, ChunkFiles, pieces_of, run_parallel
from gptpar.checkpoint.ranks import Ranks
from gptpar.errors import CheckpointError
from gptpar.system.snapshot import Snapshot
from gptpar.system.switch_interval import SWITCH_INTERVAL
from gptpar.topology.tensor_parts import Box, TensorParts, box_view, first_overlap, flat_boxes, overlap

_MANIFEST_BYTES_PER_CHUNK = 1024

Target = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""(offsets in a chunk, sizes) of a box, and where its elements go."""


class ChunkWriter:
    """Writes each rank's share of the boxes into `rank00000.bin`; rank 0 then hands the manifest to `publish`.

    Args:
        path: the folder.
        entries: every tensor's dtype and shape, without chunks.
        together: the ranks whose files come into rank 0's folder; None: all.
    """

    def __init__(
        self,
        path: Path,
        ranks: Ranks,
        iteration: int,
        entries: Mapping[str, TensorEntry],
        meta: dict[str, Any],
        snapshot: Snapshot,
        publish: Callable[[Manifest], None],
        together: Collection[int] | None = None,
    ):
        self._path, self._ranks, self._iteration = path, ranks, iteration
        self._entries, self._meta = entries, meta
        self._snapshot, self._publish, self._together = snapshot, publish, together

    def save(self, tensors: Mapping[str, TensorParts]) -> None:
        """Write the tensors; every rank calls this with the parts that it holds.

        Raises:
            CheckpointError: on every rank, if any fails; the parts do not tile the tensors, or the disk lacks room.
        """
        held: dict[HeldBox, torch.Tensor] = {}

        def hold() -> list[HeldBox]:
            held.update(held_boxes(tensors))
            return list(held)

        share = self._ranks.through_main(hold, self.plan)
        self._ranks.through_main(lambda: self._write({box: held[box] for box in share}), self.finish)

    def plan(self, held: list[list[HeldBox]]) -> list[list[HeldBox]]:
        """Each rank's share of all ranks' boxes; refuses a save that the disk cannot hold, before a byte is written."""
        shares = divide(held)
        require_tiling({name: entry.shape for name, entry in self._entries.items()}, shares)
        here = [share for rank, share in enumerate(shares) if self._together is None or rank in self._together]
        boxes = [box for share in here for box in share]
        needed = sum(box.num_bytes for box in boxes) + _MANIFEST_BYTES_PER_CHUNK * (len(boxes) + 1)
        space = os.statvfs(self._path)
        free = space.f_bavail * space.f_frsize
        unknown = free == 0 and space.f_blocks == 0  # a file system that does not count: the write may fail
        if needed > free and not unknown:
            raise CheckpointError(
                f"iteration {self._iteration} needs {needed / 2**20:,.1f} MiB and {self._path.parent} has "
                f"{free / 2**20:,.1f} MiB free; nothing was written. "
                "Free space, keep fewer checkpoints, or save elsewhere"
            )
        return shares

    def _write(self, share: Mapping[HeldBox, torch.Tensor]) -> list[tuple[str, Chunk]]:
        """Write this rank's share, one box after the other in the file; returns each one's tensor and chunk."""
        self._snapshot.read_only(list(share.values()))
        if not share:
            return []
        name = file_of(self._ranks.rank)
        pieces = [self._snapshot.pieces(tensor) for tensor in share.values()]
        places = list(itertools.accumulate((one.num_bytes for one in itertools.chain(*pieces)), initial=0))
        buffers = AlignedBuffers(NUM_THREADS, pinned=any(tensor.is_cuda for tensor in share.values()))
        file = DataFile(self._path / name, self._ranks.moved)
        try:
            file.reserve(0, places[-1])
            calls = [
                partial(file.write_piece, buffers, partial(self._snapshot.read, piece), place, piece.num_bytes)
                for piece, place in zip(itertools.chain(*pieces), places, strict=False)
            ]
            with SWITCH_INTERVAL.long_again():
                sums = iter(run_parallel(calls))
                file.sync()
        finally:
            file.close()
        written, start = [], 0
        for box, of_box in zip(share, pieces, strict=True):
            stored = tuple((one.num_bytes, next(sums)) for one in of_box)
            written.append((box.name, Chunk(box.offsets, box.sizes, name, start, stored)))
            start += box.num_bytes
        return written

    def finish(self, written: list[list[tuple[str, Chunk]]]) -> list[None]:
        """Publish the manifest of what all ranks have written."""
        chunks: dict[str, list[Chunk]] = {}
        for name, chunk in (one for of_rank in written for one in of_rank):
            chunks.setdefault(name, []).append(chunk)
        tensors = {name: replace(self._entries[name], chunks=tuple(found)) for name, found in chunks.items()}
        self._publish(Manifest(self._iteration, tensors, self._meta))
        return [None] * len(written)


def fill(path: Path, manifest: Manifest, targets: Mapping[str, TensorParts]) -> None:
    """Fill targets from a checkpoint's boxes; no byte is used before its piece's CRC-32 is checked.

    Raises:
        DamagedCheckpoint: the first damaged piece.
    """
    with ChunkFiles(path) as files:
        calls, names = [], set()
        for name, target in targets.items():
            entry, held = manifest.tensors[name], held_parts(target)
            for chunk in (one for one in entry.chunks if one.pieces):
                if not (wanted := _wanted(chunk, held)):
                    continue
                names.add(chunk.file)
                cut = pieces_of(chunk, entry.dtype.itemsize)
                calls += [partial(_read_piece, files, name, entry.dtype, chunk, *one, wanted) for one in cut]
        files.open(names)
        run_parallel(calls)


def _wanted(chunk: Chunk, held: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> list[Target]:
    """The targets of a chunk: the boxes of it that parts of a tensor hold."""
    wanted: list[Target] = []
    for offsets, part in held:
        if (box := overlap((chunk.offsets, chunk.sizes), (offsets, tuple(part.shape)))) is not None:
            inside = tuple(low - at for low, at in zip(box[0], chunk.offsets, strict=True))
            wanted.append((inside, box[1], box_view(part, box, offsets)))
    return wanted


@torch.no_grad()
def _read_piece(
    files: ChunkFiles,
    name: str,
    dtype: torch.dtype,
    chunk: Chunk,
    index: int,
    start: int,
    stop: int,
    targets: list[Target],
) -> None:
    """Copy a chunk's elements start..stop, one piece, into the targets that overlap it. Without any it is not read."""
    copies = list(_copies(chunk.sizes, start, stop, targets))
    if not copies:
        return
    with files.read(name, chunk, index, dtype.itemsize) as piece:
        values = piece.view(dtype)
        for first, box, part, target in copies:
            source = values[first : first + prod(box[1])].view(box[1])
            target.copy_(box_view(source, part, box[0]))


def _copies(
    shape: tuple[int, ...], start: int, stop: int, targets: list[Target]
) -> Iterator[tuple[int, Box, Box, torch.Tensor]]:
    """What to copy of a chunk's elements start..stop, a piece: (place of a box's first element in the piece, the box,
    the part of it that a target wants, the target's elements)."""
    first = 0
    for box in flat_boxes(shape, start, stop):
        for offsets, sizes, target in targets:
            if (part := overlap(box, (offsets, sizes))) is not None:
                yield first, box, part, box_view(target, part, offsets)
        first += prod(box[1])


class HeldBox(NamedTuple):
    """A box of a tensor, as one or more ranks hold it.

    Attributes:
        name: of the tensor.
        offsets, sizes: in elements of the tensor.
        num_bytes: of the box.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


def held_boxes(tensors: Mapping[str, TensorParts]) -> dict[HeldBox, torch.Tensor]:
    """All boxes that this rank could write, with their elements."""
    return {
        HeldBox(name, tuple(offsets), tuple(part.shape), part.numel() * part.itemsize): part
        for name, tensor in tensors.items()
        for offsets, part in held_parts(tensor)
    }


def held_parts(tensor: TensorParts) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The parts that have elements; of a tensor without elements, one empty part."""
    if not tensor.shape.numel():
        return [((0,) * len(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype))]
    return [(offsets, part) for offsets, part in tensor.parts if part.numel()]


def who_writes(ranks: Ranks, tensors: Mapping[str, TensorParts]) -> tuple[list[int], list[set[int]]]:
    """Predict a save of tensors: (bytes of each rank's file, the ranks whose files each rank would load)."""
    held = ranks.each(lambda: list(held_boxes(tensors)))
    shares = divide(held)
    writers = {box: rank for rank, share in enumerate(shares) for box in share}
    return [sum(box.num_bytes for box in share) for share in shares], [{writers[box] for box in one} for one in held]


def divide(held: Sequence[Iterable[HeldBox]]) -> list[list[HeldBox]]:
    """The boxes that each rank writes: of a box's holders, the one with the fewest bytes so far writes it.

    Args:
        held: each rank's boxes.
    """
    holders: dict[HeldBox, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    num_bytes, shares = [0] * len(held), [list[HeldBox]() for _ in held]
    for box, ranks in holders.items():
        writer = min(ranks, key=num_bytes.__getitem__)
        num_bytes[writer] += box.num_bytes
        shares[writer].append(box)
    return shares


def require_tiling(shapes: Mapping[str, Sequence[int]], shares: Iterable[Iterable[HeldBox]]) -> None:
    """Require that a tensor's boxes hold each element once: a wrong layout must not make a checkpoint with holes.

    Args:
        shapes: of every tensor that any rank names.

    Raises:
        CheckpointError: some tensor's boxes do not hold each of its elements once.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for box in (box for share in shares for box in share):
        boxes[box.name].append((box.offsets, box.sizes))
    problems = []
    for name, shape in shapes.items():
        covered = sum(prod(sizes) for _, sizes in boxes[name])
        if boxes[name][1:] and (pair := first_overlap(shape, boxes[name])) is not None:
            one, other = starmap(lambda offsets, sizes: f"{list(sizes)} at {list(offsets)}", pair)
            problems.append(f"of tensor {name!r} {list(shape)} the parts {one} and {other} overlap")
        elif covered != prod(shape):
            problems.append(f"of tensor {name!r} {list(shape)} the ranks hold {covered} of {prod(shape)} elements")
    if problems:
        more = f" (and {len(problems) - 1} more tensors are not held exactly once)" if problems[1:] else ""
        raise CheckpointError(f"the layout is wrong: {problems[0]}{more}; nothing was written")
