"""The state of one moment, which a save reads while training goes on and overwrites it.

Nothing is copied when a snapshot is taken: the bytes of the moment are where they were. Whoever is about to overwrite
some asks first (:meth:`StateGuard.before_write`). What the save has not read by then is copied where memory has room,
and waited for where it has none. Copies begin ahead of that in threads of the save, because state does not change
during the forward and backward passes. On a GPU with room the state is cloned at once, which takes milliseconds.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue

import torch

from gptpar.system.blocks import copy_bytes, row_major_blocks, span
from gptpar.system.spare_memory import SpareMemory

PIECE_BYTES = 8 << 20
"""What is copied, read and written at a time."""

NUM_BUFFERS = 4
"""Buffers of a piece each that threads of a save share."""


class _State(Enum):
    LIVE = auto()
    """The bytes are where training will overwrite them."""
    COPYING = auto()
    KEPT = auto()
    """The bytes are in memory of the snapshot."""
    DONE = auto()
    """Nobody needs the bytes any more."""


@dataclass(eq=False, slots=True)
class _Region:
    """Memory that is kept or let go as a whole.

    Attributes:
        source: where the bytes are; ``None``: nobody needs them any more.
        start, stop: addresses that nobody may overwrite; equal: nobody else has this memory.
        readers: threads that read memory of the training just now.
        num_unread: pieces that the save has not read.
        memory: that was borrowed to keep the bytes.
    """

    source: torch.Tensor | None
    start: int
    stop: int
    num_bytes: int
    num_unread: int
    state: _State = _State.LIVE
    readers: int = 0
    memory: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """At most ``PIECE_BYTES`` of a tensor's row-major bytes.

    Attributes:
        index: its place among the pieces of its region.
    """

    region: _Region
    index: int
    num_bytes: int


class Snapshot:
    """The bytes that some tensors have now, until they are read once.

    Args:
        tensors: in the order in which the save will read them; who overwrites one calls :meth:`before_write` first.
        room: bytes of host memory that copies may take.
        clones: whether tensors of a GPU are cloned there at once.
        spare: where copies get their memory from; default: from the system.

    Attributes:
        room: as given.
        waited_s: seconds for which overwriting had to wait, or copied by itself.
        most_kept: bytes of host memory that copies took at most.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        room: int = 0,
        *,
        clones: bool = False,
        spare: SpareMemory | None = None,
    ):
        self.waited_s, self.most_kept = 0.0, 0
        self.room = self._room = room
        self._spare = SpareMemory() if spare is None else spare
        self._changed = threading.Condition()
        self._pieces: dict[int, list[Piece]] = {}
        self._tensors = list(tensors)  # alive, so that their ids are theirs alone
        for tensor in self._tensors:
            self._pieces[id(tensor)] = list(_pieces_of(tensor, clones and tensor.is_cuda))
        guarded = list(filter(_is_guarded, dict.fromkeys(self._regions())))
        self._ahead = iter(guarded)
        self._guarded = sorted(guarded, key=lambda one: one.start)
        self._starts = [one.start for one in self._guarded]
        self._longest = max((one.stop - one.start for one in self._guarded), default=0)
        device = next((tensor.device for tensor in self._tensors if tensor.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(NUM_BUFFERS if device is not None and guarded and room else 0):
            self._staging.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    def _regions(self) -> Iterator[_Region]:
        """All of them; one with several pieces comes several times."""
        return (piece.region for pieces in self._pieces.values() for piece in pieces)

    def pieces(self, tensor: torch.Tensor) -> Sequence[Piece]:
        """One of the snapshot's tensors, in order; none of a tensor without elements.

        Raises:
            KeyError: the tensor is not one of the snapshot's.
        """
        return self._pieces[id(tensor)] if tensor.numel() else ()

    def read_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release all tensors but these: other processes hold the same bytes and write them."""
        read = {piece.region for tensor in tensors for piece in self.pieces(tensor)}
        with self._changed:
            for region in set(self._regions()) - read:
                self._finish(region)
            self._changed.notify_all()

    # Reading.

    def read(self, piece: Piece, target: torch.Tensor) -> None:
        """Copy a piece's bytes, of the snapshot's moment, to ``target`` [bytes], uint8, on the host; once a piece."""
        region = piece.region
        with self._changed:
            source, is_live = region.source, region.state is not _State.KEPT
            assert source is not None, "a piece was read twice, or after the end"
            region.readers += is_live
        try:
            with self._on_stream():
                copy_bytes(target, _blocks(source)[piece.index])
        finally:
            with self._changed:
                region.readers -= is_live
                region.num_unread -= 1
                if not region.num_unread:
                    self._finish(region)
                self._changed.notify_all()

    def copy_ahead(self) -> None:
        """Copy regions while memory has room, until all are copied or read; several threads may call it."""
        while (region := self._next_ahead()) is not None:
            self._copy(region)

    def _next_ahead(self) -> _Region | None:
        """The next region to copy ahead, reserved, as soon as memory has room; ``None``: there is none."""
        with self._changed:
            for region in self._ahead:
                while not self._may_copy(region) and _is_live(region):
                    self._changed.wait()
                if self._may_copy(region):
                    self._reserve(region)
                    return region
        return None

    # Overwriting.

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return when these tensors' memory may be overwritten."""
        started = time.perf_counter()
        for tensor in tensors:
            for region in self._overlapping(*span(tensor)):
                self._free(region)
        self.waited_s += time.perf_counter() - started

    def _free(self, region: _Region) -> None:
        while True:
            with self._changed:
                if not _is_live(region) and not region.readers:
                    return
                if not self._may_copy(region):
                    self._changed.wait()
                    continue
                self._reserve(region)
            self._copy(region)

    def _overlapping(self, start: int, stop: int) -> Iterator[_Region]:
        place = bisect_left(self._starts, stop) - 1
        while place >= 0 and self._starts[place] > start - self._longest:
            region = self._guarded[place]
            if region.stop > start:
                yield region
            place -= 1

    # Copies. The caller holds the lock, but for `_copy`.

    def _may_copy(self, region: _Region) -> bool:
        return region.state is _State.LIVE and region.num_bytes <= self._room

    def _reserve(self, region: _Region) -> None:
        region.state = _State.COPYING
        self._room -= region.num_bytes
        self.most_kept = max(self.most_kept, self.room - self._room)

    def _copy(self, region: _Region) -> None:
        """Keep a reserved region's bytes, unless the save has read them meanwhile."""
        source, memory, kept = region.source, None, None
        try:
            if source is not None:
                first, last = span(source)
                memory = self._spare.take(last - first)
                view = memory.view(source.dtype).as_strided(source.shape, source.stride())
                self._keep(source, memory, view)
                kept = view
        except (MemoryError, OSError, RuntimeError):
            pass  # there is no room after all
        with self._changed:
            if source is not None and kept is None:
                self._room = -self.room
            if region.state is _State.COPYING and kept is not None:
                region.state, region.source, region.memory = _State.KEPT, kept, memory
            else:
                region.state = _State.LIVE if region.state is _State.COPYING else region.state
                self._room += region.num_bytes
                if memory is not None:
                    self._spare.give_back(memory)
            self._changed.notify_all()

    def _keep(self, source: torch.Tensor, memory: torch.Tensor, kept: torch.Tensor) -> None:
        """Copy a region's bytes to borrowed memory, of which ``kept`` is a view like ``source``."""
        if not source.is_cuda or not source.is_contiguous() or source.nbytes > PIECE_BYTES:
            with self._on_stream():
                copy_bytes(memory, source) if source.is_contiguous() else kept.copy_(source)
            return
        staging = self._staging.get()  # copies to memory that is not pinned would go through the driver, slowly
        try:
            with self._on_stream():
                copy_bytes(staging[: source.nbytes], source)
            copy_bytes(memory, staging[: source.nbytes])
        finally:
            self._staging.put(staging)

    def _finish(self, region: _Region) -> None:
        if region.state is _State.KEPT:
            self._room += region.num_bytes
            assert region.memory is not None
            self._spare.give_back(region.memory)
        region.state, region.source, region.memory = _State.DONE, None, None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A stream of the snapshot, which follows the work that was launched before the snapshot was taken."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def close(self) -> None:
        """Release everything; the save reads no longer."""
        with self._changed:
            for region in self._regions():
                self._finish(region)
            self._changed.notify_all()


class StateGuard:
    """Everything that overwrites weights or optimizer state asks it first, so that a save under way loses no byte.

    Attributes:
        snapshot: of the save under way; ``None``: there is none.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return when the tensors' memory may be overwritten by work that is launched from now on."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.before_write(tensors)


def _is_guarded(region: _Region) -> bool:
    return region.stop > region.start


def sizes_of_copies(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Bytes of each block of memory that a snapshot of these tensors borrows where all of them are overwritten."""
    regions = dict.fromkeys(piece.region for tensor in tensors for piece in _pieces_of(tensor, clone=False))
    return (region.num_bytes for region in regions)


def _is_live(region: _Region) -> bool:
    return region.state in (_State.LIVE, _State.COPYING)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(row_major_blocks(tensor, PIECE_BYTES))


@torch.no_grad()
def _pieces_of(tensor: torch.Tensor, clone: bool) -> Iterator[Piece]:
    """A contiguous tensor's pieces are regions of their own; another tensor, or a clone, is one region."""
    tensor = tensor.detach()
    if clone:
        tensor = tensor.clone()
    blocks = _blocks(tensor)
    if tensor.is_contiguous() and not clone:
        for block in blocks:
            yield Piece(_Region(block, *span(block), block.nbytes, 1), 0, block.nbytes)
        return
    first, last = span(tensor)
    region = _Region(tensor, first, first if clone else last, last - first, len(blocks))
    for index, block in enumerate(blocks):
        yield Piece(region, index, block.nbytes)
