"""Divides tensors into regions of memory, which a snapshot keeps or releases, and pieces, which a save reads."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

PIECE_BYTES = 8 << 20
"""Bytes that are copied, read and written at a time."""


class RegionState(Enum):
    """The place of a region's bytes."""

    LIVE = auto()
    """The bytes are in memory that training will overwrite."""
    COPYING = auto()
    KEPT = auto()
    """The bytes are in memory that the snapshot has borrowed, or got in exchange."""
    DONE = auto()
    """Nobody needs the bytes any more."""


@dataclass(eq=False, slots=True)
class Borrowed:
    """A block that holds regions: taken from the spare memory, or given by its owner in exchange for such a block.

    Attributes:
        block: goes back to the spare memory when no region needs it any more.
        num_regions: number of regions that need the block.
    """

    block: torch.Tensor
    num_regions: int = 1


@dataclass(eq=False, slots=True)
class MemoryRegion:
    """Memory that a snapshot keeps or releases whole.

    Attributes:
        source: the tensor that has the bytes; ``None``: nobody needs them any more.
        blocks: views of it of at most ``PIECE_BYTES`` each, in row-major order.
        start, stop: addresses that must not be overwritten; equal if nobody else uses this memory.
        num_bytes: bytes of the region.
        num_unread: pieces that the save has not read yet.
        state: where the bytes are.
        readers: threads that are reading the bytes from training's memory now.
        borrowed: the block that keeps the bytes.
    """

    source: torch.Tensor | None
    blocks: tuple[torch.Tensor, ...]
    start: int
    stop: int
    num_bytes: int
    num_unread: int
    state: RegionState = RegionState.LIVE
    readers: int = 0
    borrowed: Borrowed | None = None

    @property
    def is_guarded(self) -> bool:
        """Whether training uses this memory, too."""
        return self.stop > self.start

    @property
    def is_live(self) -> bool:
        """Whether the bytes are still needed in memory that training will overwrite."""
        return self.state in (RegionState.LIVE, RegionState.COPYING)


@dataclass(frozen=True, slots=True)
class Piece:
    """At most ``PIECE_BYTES`` of a tensor's row-major bytes.

    Attributes:
        region: the region that has the piece.
        index: the piece's place among the region's blocks.
        num_bytes: the piece's bytes.
    """

    region: MemoryRegion
    index: int
    num_bytes: int


def pieces_of(
    tensors: Iterable[torch.Tensor], clones: Callable[[torch.Tensor], bool] | None = None
) -> list[list[Piece]]:
    """Each tensor's pieces. If it is contiguous, each piece is a region; another tensor, or a clone, is one region.

    Args:
        clones: whether a tensor is cloned; default: none is.
    """
    return [_pieces_of(tensor.detach(), clones is not None and clones(tensor)) for tensor in tensors]


def _pieces_of(tensor: torch.Tensor, clone: bool) -> list[Piece]:
    if not clone and tensor.is_contiguous():
        return [Piece(_region(block, False), 0, block.nbytes) for block in row_major_blocks(tensor, PIECE_BYTES)]
    region = _region(tensor.clone() if clone else tensor, clone)
    return [Piece(region, index, block.nbytes) for index, block in enumerate(region.blocks)]


def _region(source: torch.Tensor, clone: bool) -> MemoryRegion:
    first, last = span(source)
    blocks = tuple(row_major_blocks(source, PIECE_BYTES))
    return MemoryRegion(source, blocks, first, first if clone else last, last - first, len(blocks))


def regions_of(pieces: Iterable[Sequence[Piece]]) -> list[MemoryRegion]:
    """The regions that the pieces of tensors are in, each once."""
    return list(dict.fromkeys(piece.region for of_tensor in pieces for piece in of_tensor))


class GuardedRegions:
    """The regions among some that training uses, too, by their addresses."""

    def __init__(self, regions: Iterable[MemoryRegion] = ()):
        self._regions = sorted((one for one in regions if one.is_guarded), key=lambda one: one.start)
        self._starts = [one.start for one in self._regions]
        self._longest = max((one.stop - one.start for one in self._regions), default=0)

    def __len__(self) -> int:
        return len(self._regions)

    def overlapping(self, tensor: torch.Tensor) -> Iterator[MemoryRegion]:
        """The regions that have any of a tensor's addresses."""
        start, stop = span(tensor)
        place = bisect_left(self._starts, stop) - 1
        while place >= 0 and self._starts[place] > start - self._longest:
            region = self._regions[place]
            if region.stop > start:
                yield region
            place -= 1

    def live(self, block: torch.Tensor) -> list[MemoryRegion]:
        """The regions whose bytes are still needed in a block's memory."""
        return [region for region in self.overlapping(block) if region.is_live]


class GuardedSpans:
    """Blocks of memory that do not overlap, by their addresses."""

    def __init__(self, blocks: Iterable[torch.Tensor] = ()):
        self._spans = sorted(span(block) for block in blocks if block.numel())
        self._starts = [start for start, _ in self._spans]

    def overlap(self, start: int, stop: int) -> bool:
        """Whether one of the blocks has any of these addresses."""
        place = bisect_left(self._starts, stop) - 1
        return place >= 0 and self._spans[place][1] > start

    def outside(self, regions: Iterable[MemoryRegion]) -> list[MemoryRegion]:
        """The regions among some that training uses, too, and that lie outside all of the blocks."""
        return [one for one in regions if one.is_guarded and not self.overlap(one.start, one.stop)]


def sizes_of_copies(tensors: Iterable[torch.Tensor], exchanged: Iterable[torch.Tensor] = ()) -> Iterator[int]:
    """Bytes of each block of memory that a snapshot of these tensors borrows if all of them are overwritten.

    Args:
        exchanged: see :class:`~gptpar.system.snapshot.Snapshot`.
    """
    blocks = list(exchanged)
    yield from (region.num_bytes for region in GuardedSpans(blocks).outside(regions_of(pieces_of(tensors))))
    yield from (block.numel() for block in blocks)


def row_major_blocks(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """Consecutive parts of a tensor, each a view of at most ``max_bytes``, in the order of its row-major bytes.

    The parts depend on shape, strides and number format alone. Those of a contiguous tensor are contiguous.
    """
    if not tensor.numel():
        return
    if tensor.nbytes <= max_bytes:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(max_bytes // tensor.itemsize)
    elif rows := max_bytes // tensor[0].nbytes:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from row_major_blocks(row, max_bytes)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """(first address, address past the last) of the memory of a tensor's elements; (0, 0) if it has none."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@torch.no_grad()
def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor's row-major bytes to ``target`` [bytes], uint8, on the host; complete when this returns.

    A contiguous tensor on the host is copied by this thread alone: torch's copy would wake all of its threads.
    """
    source = source.contiguous()
    if source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # ctypes releases Python's lock
        return
    flat = source.as_strided((source.numel(),), (1,)).view(torch.uint8)
    target.copy_(flat, non_blocking=target.is_pinned())
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()
