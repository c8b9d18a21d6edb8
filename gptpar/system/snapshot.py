"""``Snapshot``: the state at a save's moment, read later.

Nothing is copied when a snapshot is taken: the bytes of the moment are where they were. Whoever is about to overwrite
some asks first, through the :class:`~gptpar.system.state_guard.StateGuard`. What the save has not read by then is
copied where memory has room, and waited for where it has none. Copies begin ahead of that in threads of the save,
because state does not change during the forward and backward passes. On a GPU with room the state is cloned at once,
which takes milliseconds; so is what somebody overwrites who does not ask.

Whoever is about to overwrite a whole block of memory may take another block in exchange (:meth:`Snapshot.exchange`).
Then nothing is copied: the snapshot keeps the old block. It may do so before the parts in the block are known.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from gptpar.errors import NotSavedError
from gptpar.system.regions import (
    PIECE_BYTES,
    Borrowed,
    GuardedRegions,
    GuardedSpans,
    MemoryRegion,
    Piece,
    RegionState,
    copy_bytes,
    pieces_of,
    regions_of,
    row_major_blocks,
    span,
)
from gptpar.system.spare_memory import SpareMemory

STILL_SECONDS = 1800.0
"""How long a save may move no piece until its disk counts as hung; as long as a worker that was asked to stop may show
no sign of life."""

T = TypeVar("T")

NUM_BUFFERS = 4
"""Buffers of a piece each that threads of a save share."""


class Snapshot:
    """The bytes that some tensors have now, until they are read once.

    Args:
        tensors: in the order in which the save will read them; who overwrites one calls :meth:`before_write` first.
        room: bytes of host memory that copies may take.
        clones: whether a tensor is cloned at once, on its device: there may be room on a GPU, or whoever overwrites
            it does not ask; default: none is.
        spare: where copies get their memory from; default: from the system.
        exchanged: blocks of memory whose owner calls :meth:`exchange`: they are not copied ahead.
        more: whether :meth:`hold` and :meth:`add` follow.

    Attributes:
        room: the memory for copies, as given.
        waited_s: seconds for which overwriting had to wait, or copied by itself, or a step waited for :meth:`hold`.
        most_kept: bytes of host memory that copies, and blocks given in exchange, took at most.
        closed: set once the save reads no longer.

    State: ``_changed`` is the lock, and wakes who waits for a change. ``_pieces`` (by a tensor's id) are the pieces of
    ``_tensors``, ``_regions`` their regions, and ``_guarded`` those among them that training may overwrite. ``_ahead``
    are the regions still to be copied ahead. ``_room`` is what is left of ``room``, negative once the system had no
    more memory. ``_is_held`` is set when ``_held`` has the blocks of :meth:`hold`, ``_complete`` when all tensors are
    known; in between, ``_exchanged_early`` are the blocks given in exchange. ``_staging`` are free buffers in pinned
    memory.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        room: int = 0,
        *,
        clones: Callable[[torch.Tensor], bool] | None = None,
        spare: SpareMemory | None = None,
        exchanged: Iterable[torch.Tensor] = (),
        more: bool = False,
    ):
        self.waited_s, self.most_kept = 0.0, 0
        self.room = self._room = room
        self._spare = SpareMemory() if spare is None else spare
        self.closed = threading.Event()
        self._changed = threading.Condition()
        self._pieces: dict[int, list[Piece]] = {}
        self._tensors: list[torch.Tensor] = []  # alive, so that their ids are theirs alone
        self._regions: list[MemoryRegion] = []
        self._guarded = GuardedRegions()
        self._ahead: deque[MemoryRegion] = deque()
        self._held = GuardedSpans()
        self._exchanged_early: list[Borrowed] = []  # of blocks whose parts were not known
        self._is_held, self._complete = threading.Event(), threading.Event()
        self._take(tensors, exchanged, clones, completes=not more)
        device = next((tensor.device for tensor in self._tensors if tensor.is_cuda), None)
        self._on_stream: Callable[[], AbstractContextManager[object]] = (
            nullcontext if device is None else partial(torch.cuda.stream, _stream_beside(device))
        )
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(NUM_BUFFERS if device is not None and self._guarded and room else 0):
            self._staging.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    def hold(self, blocks: Iterable[torch.Tensor]) -> None:
        """Guard blocks of host memory, which have bytes of the snapshot's moment only now; once.

        Nobody may overwrite one before (:meth:`wait_until_held`). From now on who overwrites one takes another block in
        exchange, or waits for :meth:`add`, which says what is needed of them. To find that out takes a large model
        tenths of a second.
        """
        self._held = GuardedSpans(blocks)
        self._is_held.set()

    def add(self, tensors: Iterable[torch.Tensor], exchanged: Iterable[torch.Tensor] = ()) -> None:
        """Take tensors that are parts of the blocks held; once.

        Args:
            exchanged: see :class:`Snapshot`; as it was at :meth:`hold`.
        """
        self._take(tensors, exchanged, completes=True)

    def _end_holding(self) -> None:
        """End the addition of parts, because all are known; the caller holds the lock."""
        for borrowed in self._exchanged_early:
            borrowed.num_regions -= 1
            self._give_back_if_free(borrowed)
        self._exchanged_early = []
        self._is_held.set()
        self._complete.set()

    def wait_until_held(self) -> None:
        """Return when :meth:`hold` was called, or the save is over."""
        self._wait(self._is_held)

    def _wait(self, event: threading.Event) -> None:
        started = time.perf_counter()
        event.wait()
        self.waited_s += time.perf_counter() - started

    def _holds(self, tensor: torch.Tensor) -> bool:
        return not self._complete.is_set() and self._held.overlap(*span(tensor))

    def _take(
        self,
        tensors: Iterable[torch.Tensor],
        exchanged: Iterable[torch.Tensor],
        clones: Callable[[torch.Tensor], bool] | None = None,
        *,
        completes: bool,
    ) -> None:
        more = list(tensors)
        pieces = pieces_of(more, clones)
        regions = [*self._regions, *(new := regions_of(pieces))]
        ahead, guarded = GuardedSpans(exchanged).outside(new), GuardedRegions(regions)
        with self._changed:
            self._tensors += more
            self._pieces |= zip(map(id, more), pieces, strict=True)
            self._ahead += ahead
            self._regions, self._guarded = regions, guarded
            for borrowed in self._exchanged_early:
                self._keep_in(borrowed, guarded.live(borrowed.block))
            if completes:
                self._end_holding()
            self._changed.notify_all()

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
            for region in set(self._regions) - read:
                self._finish(region)
            self._changed.notify_all()

    # Reading.

    def read(self, piece: Piece, take: Callable[[torch.Tensor], T]) -> T:
        """Return what ``take`` makes of a piece, which has the bytes of the snapshot's moment; once a piece.

        Args:
            take: is called in the snapshot's CUDA stream, and keeps nothing of the tensor.
        """
        region = piece.region
        with self._changed:
            assert region.blocks, "a piece was read twice, or after the end"
            block, is_live = region.blocks[piece.index], region.state is not RegionState.KEPT
            region.readers += is_live
        try:
            with self._on_stream():
                return take(block)
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

    def _next_ahead(self) -> MemoryRegion | None:
        """The next region to copy ahead, reserved, as soon as memory has room; ``None``: there is none."""
        with self._changed:
            while self._ahead or not self._complete.is_set():
                if not self._ahead:
                    self._changed.wait()
                    continue
                region = self._ahead.popleft()
                while not self._may_copy(region) and region.is_live:
                    self._changed.wait()
                if self._may_copy(region):
                    self._reserve(region)
                    return region
        return None

    # Overwriting.

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return when these tensors' memory may be overwritten.

        Raises:
            NotSavedError: memory has no room, and the save hangs.
        """
        for tensor in tensors:
            if self._holds(tensor):
                self._wait(self._complete)
            for region in self._guarded.overlapping(tensor):
                if region.is_live or region.readers:
                    started = time.perf_counter()
                    self._free(region)
                    self.waited_s += time.perf_counter() - started

    def _free(self, region: MemoryRegion) -> None:
        while True:
            with self._changed:
                if not region.is_live and not region.readers:
                    return
                if not self._may_copy(region):
                    self._wait_for_disk()
                    continue
                self._reserve(region)
            self._copy(region)

    def _wait_for_disk(self) -> None:
        """Wait until something has changed, as each piece that is read changes something."""
        if not self._changed.wait(STILL_SECONDS):
            raise NotSavedError(
                f"the save under way has taken no piece of the state for {STILL_SECONDS / 60:g} minutes, so that its "
                "file system does not answer, and memory has no room for what training is about to overwrite. Older "
                "checkpoints are whole, and the newest state is not on the disk."
            )

    def exchange(self, block: torch.Tensor) -> torch.Tensor | None:
        """Another block for somebody who is about to overwrite all of this one, and goes on with the other.

        Args:
            block: [n] uint8, of the spare memory's kind; the snapshot gives it to the spare memory in the end.

        Returns:
            [n] uint8 of any contents; ``None``: nothing of the block is needed, or there is no room for another: the
            owner keeps it, and calls :meth:`before_write`. While it is not known what is needed of the block, another
            one is given.
        """
        with self._changed:
            while any(region.state is RegionState.COPYING for region in self._guarded.live(block)):
                self._changed.wait()
            is_held, needed = self._holds(block), self._guarded.live(block)
            if not (needed or is_held) or block.numel() > self._room:
                return None
            try:
                other = self._spare.take(block.numel())
            except (MemoryError, OSError, RuntimeError):
                return None
            self._use(block.numel())
            borrowed = Borrowed(block, int(is_held))  # the block is needed until its parts are known
            self._keep_in(borrowed, needed)
            if is_held:
                self._exchanged_early.append(borrowed)
            return other

    @staticmethod
    def _keep_in(borrowed: Borrowed, regions: Iterable[MemoryRegion]) -> None:
        """A block that the snapshot has now keeps the regions that lie in it."""
        for region in regions:
            region.state, region.borrowed = RegionState.KEPT, borrowed
            borrowed.num_regions += 1

    def needs(self, block: torch.Tensor) -> bool:
        """Whether the save has not read all of a block that is still where it was."""
        if self._holds(block):
            return True
        with self._changed:
            return bool(self._guarded.live(block))

    # Copies. The caller holds the lock, but for `_copy`.

    def _may_copy(self, region: MemoryRegion) -> bool:
        return region.state is RegionState.LIVE and region.num_bytes <= self._room

    def _reserve(self, region: MemoryRegion) -> None:
        region.state = RegionState.COPYING
        self._use(region.num_bytes)

    def _use(self, num_bytes: int) -> None:
        self._room -= num_bytes
        self.most_kept = max(self.most_kept, self.room - self._room)

    def _copy(self, region: MemoryRegion) -> None:
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
            if region.state is RegionState.COPYING and kept is not None:
                assert memory is not None
                region.state, region.source, region.borrowed = RegionState.KEPT, kept, Borrowed(memory)
                region.blocks = tuple(row_major_blocks(kept, PIECE_BYTES))
            else:
                region.state = RegionState.LIVE if region.state is RegionState.COPYING else region.state
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

    def _finish(self, region: MemoryRegion) -> None:
        borrowed = region.borrowed
        if borrowed is not None:
            borrowed.num_regions -= 1
            self._give_back_if_free(borrowed)
        region.state, region.source, region.blocks, region.borrowed = RegionState.DONE, None, (), None

    def _give_back_if_free(self, borrowed: Borrowed) -> None:
        if not borrowed.num_regions:
            self._room += borrowed.block.numel()
            self._spare.give_back(borrowed.block)

    def close(self) -> None:
        """Release everything; the save reads no longer."""
        with self._changed:
            self._end_holding()
            for region in self._regions:
                self._finish(region)
            self._changed.notify_all()
        self.closed.set()


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """A stream that follows the work launched so far."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
