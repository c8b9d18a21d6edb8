"""Divides tensors into regions of memory, which a snapshot keeps or releases, and pieces, which a save reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch

from gptpar.system.blocks import row_major_blocks, span

PIECE_BYTES = 8 << 20
"""Bytes that are copied, read and written at a time."""


class RegionState(Enum):
    """Where a region's bytes are."""

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
        start, stop: addresses that must not be overwritten; equal if nobody else uses this memory.
        num_bytes: bytes of the region.
        num_unread: pieces that the save has not read yet.
        state: where the bytes are.
        readers: threads that are reading the bytes from training's memory now.
        borrowed: the block that keeps the bytes.
    """

    source: torch.Tensor | None
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
        index: the piece's place among the pieces of its region.
        num_bytes: the piece's bytes.
    """

    region: MemoryRegion
    index: int
    num_bytes: int


def pieces_of(tensor: torch.Tensor, clone: bool) -> Iterator[Piece]:
    """A tensor's pieces. If it is contiguous, each piece is a region; another tensor, or a clone, is one region."""
    tensor = tensor.detach()
    if clone:
        tensor = tensor.clone()
    blocks = blocks_of(tensor)
    if tensor.is_contiguous() and not clone:
        first = tensor.data_ptr()
        for block in blocks:
            last = first + block.nbytes
            yield Piece(MemoryRegion(block, first, last, last - first, 1), 0, last - first)
            first = last
        return
    first, last = span(tensor)
    region = MemoryRegion(tensor, first, first if clone else last, last - first, len(blocks))
    for index, block in enumerate(blocks):
        yield Piece(region, index, block.nbytes)


class GuardedRegions:
    """Regions of memory that training uses, too, by their addresses."""

    def __init__(self, regions: Iterable[MemoryRegion]):
        self._regions = sorted(regions, key=lambda one: one.start)
        self._starts = [one.start for one in self._regions]
        self._longest = max((one.stop - one.start for one in self._regions), default=0)

    def __iter__(self) -> Iterator[MemoryRegion]:
        return iter(self._regions)

    def overlapping(self, start: int, stop: int) -> Iterator[MemoryRegion]:
        """The regions that have any of these addresses."""
        place = bisect_left(self._starts, stop) - 1
        while place >= 0 and self._starts[place] > start - self._longest:
            region = self._regions[place]
            if region.stop > start:
                yield region
            place -= 1


class GuardedSpans:
    """Blocks of memory that do not overlap, by their addresses."""

    def __init__(self, blocks: Iterable[torch.Tensor]):
        self._spans = sorted(span(block) for block in blocks if block.numel())
        self._starts = [start for start, _ in self._spans]

    def overlap(self, tensor: torch.Tensor) -> bool:
        """Whether one of the blocks has any of a tensor's addresses."""
        start, stop = span(tensor)
        place = bisect_left(self._starts, stop) - 1
        return place >= 0 and self._spans[place][1] > start


def outside(regions: Iterable[MemoryRegion], blocks: Iterable[torch.Tensor]) -> list[MemoryRegion]:
    """The regions that lie outside all of these blocks of memory."""
    spans = sorted(map(span, blocks))
    starts = [start for start, _ in spans]

    def is_outside(region: MemoryRegion) -> bool:
        place = bisect_right(starts, region.start) - 1
        return place < 0 or region.start >= spans[place][1]

    return list(filter(is_outside, regions))


def sizes_of_copies(tensors: Iterable[torch.Tensor], exchanged: Iterable[torch.Tensor] = ()) -> Iterator[int]:
    """Bytes of each block of memory that a snapshot of these tensors borrows if all of them are overwritten.

    Args:
        exchanged: see :class:`~gptpar.system.snapshot.Snapshot`.
    """
    blocks = list(exchanged)
    regions = dict.fromkeys(piece.region for tensor in tensors for piece in pieces_of(tensor, clone=False))
    yield from (region.num_bytes for region in outside(regions, blocks))
    yield from (block.numel() for block in blocks)


def blocks_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of at most ``PIECE_BYTES`` in row-major order."""
    return tuple(row_major_blocks(tensor, PIECE_BYTES))
