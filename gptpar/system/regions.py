"""Tensors as regions of memory that a snapshot keeps or lets go as a whole, and as the pieces in which it is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch

from gptpar.system.blocks import row_major_blocks, span

PIECE_BYTES = 8 << 20
"""What is copied, read and written at a time."""


class RegionState(Enum):
    """Where a region's bytes are."""

    LIVE = auto()
    """The bytes are where training will overwrite them."""
    COPYING = auto()
    KEPT = auto()
    """The bytes are in memory that the snapshot has borrowed, or got in exchange."""
    DONE = auto()
    """Nobody needs the bytes any more."""


@dataclass(eq=False, slots=True)
class Borrowed:
    """A block of the spare memory that holds regions, or that was given away for one that does.

    Attributes:
        block: to be given back when no region needs it any more.
        num_regions: that need it.
    """

    block: torch.Tensor
    num_regions: int = 1


@dataclass(eq=False, slots=True)
class MemoryRegion:
    """Memory that is kept or let go as a whole.

    Attributes:
        source: where the bytes are; ``None``: nobody needs them any more.
        start, stop: addresses that nobody may overwrite; equal: nobody else has this memory.
        readers: threads that read memory of the training just now.
        num_unread: pieces that the save has not read.
        borrowed: where the bytes are kept.
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
        """Whether others have this memory, too."""
        return self.stop > self.start

    @property
    def is_live(self) -> bool:
        """Whether the bytes are still needed where training will overwrite them."""
        return self.state in (RegionState.LIVE, RegionState.COPYING)


@dataclass(frozen=True, slots=True)
class Piece:
    """At most ``PIECE_BYTES`` of a tensor's row-major bytes.

    Attributes:
        index: its place among the pieces of its region.
    """

    region: MemoryRegion
    index: int
    num_bytes: int


@torch.no_grad()
def pieces_of(tensor: torch.Tensor, clone: bool) -> Iterator[Piece]:
    """A contiguous tensor's pieces are regions of their own; another tensor, or a clone, is one region."""
    tensor = tensor.detach()
    if clone:
        tensor = tensor.clone()
    blocks = blocks_of(tensor)
    if tensor.is_contiguous() and not clone:
        for block in blocks:
            yield Piece(MemoryRegion(block, *span(block), block.nbytes, 1), 0, block.nbytes)
        return
    first, last = span(tensor)
    region = MemoryRegion(tensor, first, first if clone else last, last - first, len(blocks))
    for index, block in enumerate(blocks):
        yield Piece(region, index, block.nbytes)


def outside(regions: Iterable[MemoryRegion], blocks: Iterable[torch.Tensor]) -> list[MemoryRegion]:
    """The regions that are in none of these blocks of memory."""
    spans = sorted(map(span, blocks))
    starts = [start for start, _ in spans]

    def is_outside(region: MemoryRegion) -> bool:
        place = bisect_right(starts, region.start) - 1
        return place < 0 or region.start >= spans[place][1]

    return list(filter(is_outside, regions))


def sizes_of_copies(tensors: Iterable[torch.Tensor], exchanged: Iterable[torch.Tensor] = ()) -> Iterator[int]:
    """Bytes of each block of memory that a snapshot of these tensors borrows where all of them are overwritten.

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
