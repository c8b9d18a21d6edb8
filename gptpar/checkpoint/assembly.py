"""Puts new tensors together block by block, from sources that have their elements in another order.

Each source is read piece by piece; a piece gives every block the elements that it has for it. A block is written when
it has all of its elements, and its memory then serves another block. So memory holds the blocks that are begun: a few
where the order is nearly the same, all of a tensor's where it is transposed. A piece is read once there is room for the
blocks that it begins. Where a tensor's blocks do not fit together, its source is read more than once.

Some threads read and copy, others write: the blocks of a transposed tensor are complete all at once, and the disk
writes them while the next tensor is read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from gptpar.checkpoint.data_file import BUFFER_BYTES, DataFile, aligned_as, aligned_memory, piece_starts
from gptpar.checkpoint.patches import Patch, common_parts
from gptpar.system.crc32 import crc32
from gptpar.system.strided_copy import copy_elements

MAX_READERS = 6
MAX_WRITERS = 12
"""Disks want several writes at a time."""
MIN_BUFFERS = 8
"""64 MiB: what a conversion may take however small its tensors are."""

Patches = Mapping[str, Sequence[Patch]]
"""Name of a view -> its patches in a block."""


@dataclass(frozen=True)
class Room:
    """Memory of a conversion, in buffers of a piece of 8 MiB each.

    Attributes:
        readers: threads that read and copy; each has a buffer for what it reads.
        blocks: blocks that may be in memory at once.
    """

    readers: int
    blocks: int

    @property
    def writers(self) -> int:
        """Threads that write blocks."""
        return min(MAX_WRITERS, self.blocks)

    @staticmethod
    def within(num_bytes: int) -> Room:
        """The room that fits a number of bytes; at least 64 MiB are taken."""
        buffers = max(MIN_BUFFERS, num_bytes // BUFFER_BYTES)
        readers = min(MAX_READERS, buffers // 3)
        return Room(readers, buffers - readers)


@dataclass(eq=False)
class FileBlock:
    """Consecutive elements of a new tensor.

    Attributes:
        tensor: the tensor.
        start: number of the first element.
        num_elements: number of elements.
        crc: CRC-32 of the bytes, if it is asked for, once they are written.
    """

    tensor: NewTensor
    start: int
    num_elements: int
    crc: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.tensor.dtype.itemsize


class NewTensor:
    """A tensor of a new file, in blocks that are cut where the file's pieces of 8 MiB begin.

    Args:
        place: of the tensor's bytes in the file.
        patches: of a block, from its first element's number and its elements' memory.
        checked: whether the blocks' CRC-32 is wanted.

    Attributes:
        blocks: in order.
    """

    def __init__(
        self,
        file: DataFile,
        place: int,
        dtype: torch.dtype,
        num_elements: int,
        patches: Callable[[int, torch.Tensor], Patches],
        *,
        checked: bool = False,
    ):
        self.file, self.place, self.dtype, self.patches, self.checked = file, place, dtype, patches, checked
        self._starts = piece_starts(place, num_elements, dtype.itemsize)
        stops = [*self._starts[1:], num_elements]
        self.blocks = [FileBlock(self, start, stop - start) for start, stop in zip(self._starts, stops, strict=False)]

    def touching(self, ranges: Iterable[tuple[int, int]]) -> list[FileBlock]:
        """The blocks that have elements of any of the ranges (number of the first element, of the last one)."""
        found = {
            number
            for first, last in ranges
            for number in range(bisect_right(self._starts, first) - 1, bisect_right(self._starts, last))
        }
        return [self.blocks[number] for number in sorted(found)]


@dataclass(frozen=True)
class Reading:
    """A piece of a source that is still to be read.

    Attributes:
        blocks: the blocks that it may have elements of.
        give: reads it, and calls :meth:`Assembly.fill` for the blocks that it is called with.
    """

    blocks: Sequence[FileBlock]
    give: Callable[[Sequence[FileBlock]], None]


@dataclass(eq=False)
class _Begun:
    """A block in memory.

    Attributes:
        memory: the whole buffer, which is free again after the block; ``data`` is a part of it.
        data: the block's bytes.
        missing: number of elements that are not there yet.
    """

    block: FileBlock
    memory: torch.Tensor
    data: torch.Tensor
    patches: Patches
    missing: int


class Assembly:
    """The blocks that are begun; several threads read, fill and write them.

    A block is begun (it has memory, and lacks elements), complete (it waits for a writer), written, or none of these
    yet. The lock of ``_changed`` guards all changes, except that a reader takes complete blocks out without it:

    ===============  ===============================================================================================
    ``_begun``       the blocks that are begun
    ``_complete``    complete blocks that no writer has taken yet
    ``_written``     all blocks that are complete or written: they are not begun again
    ``_in_memory``   number of blocks that have memory: begun, complete, or being written
    ``_free``        memory of written blocks, for the next ones
    ``_reading``,    readings and writes under way
    ``_writing``
    ``_errors``      errors of threads: after the first one nothing more is begun
    ===============  ===============================================================================================

    Attributes:
        most_begun: number of blocks that were in memory at once, at most.
    """

    def __init__(self, room: Room):
        self._room, self._changed = room, threading.Condition()
        self._begun: dict[FileBlock, _Begun] = {}
        self._written: set[FileBlock] = set()
        self._complete: deque[_Begun] = deque()
        self._free: list[torch.Tensor] = []
        self._in_memory = self.most_begun = 0
        self._reading: set[Future[None]] = set()
        self._writing: set[Future[None]] = set()
        self._errors: list[BaseException] = []

    def run(self, groups: Iterable[Sequence[Reading]]) -> None:
        """Read everything in order, and write all blocks.

        A reading begins once there is room for its blocks. When nothing is under way there is room, because
        :func:`in_passes` saw to it.

        Args:
            groups: of readings; blocks of one group have all of their elements from it.

        Raises:
            CheckpointError: a reading or a write failed; nothing more is begun then.
        """
        with ThreadPoolExecutor(self._room.writers) as writers, ThreadPoolExecutor(self._room.readers) as readers:
            try:
                for reading in (one for group in groups for one in in_passes(group, self._room.blocks)):
                    self._wait(partial(self._may_begin, reading))
                    self._begin(reading.blocks)
                    self._start(self._reading, readers, partial(self._read, reading, writers))
                self._wait(lambda: not self._reading and not self._writing)
            except BaseException:
                readers.shutdown(cancel_futures=True)
                writers.shutdown(cancel_futures=True)
                raise
        assert not self._begun and not self._complete, "a block lacks elements"

    def _start(self, under_way: set[Future[None]], pool: Executor, call: Callable[[], None]) -> None:
        future = pool.submit(call)
        with self._changed:
            under_way.add(future)
        future.add_done_callback(partial(self._ended, under_way))

    def _ended(self, under_way: set[Future[None]], future: Future[None]) -> None:
        with self._changed:
            under_way.remove(future)
            if not future.cancelled() and (error := future.exception()) is not None:
                self._errors.append(error)
            self._changed.notify()

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._errors or ready())
            if self._errors:
                raise self._errors[0]

    def _may_begin(self, reading: Reading) -> bool:
        """Whether a reader is free, or soon will be, and there is room. The caller holds the lock."""
        if not self._reading and not self._writing:
            return True
        new = sum(block not in self._begun and block not in self._written for block in reading.blocks)
        return len(self._reading) <= self._room.readers and self._in_memory + new <= self._room.blocks

    def _begin(self, blocks: Sequence[FileBlock]) -> None:
        with self._changed:
            for block in blocks:
                if block not in self._begun and block not in self._written:
                    memory, tensor = self._free.pop() if self._free else aligned_memory(), block.tensor
                    itemsize = tensor.dtype.itemsize
                    data = aligned_as(memory, tensor.place + block.start * itemsize, block.num_bytes, itemsize)
                    patches = tensor.patches(block.start, data.view(tensor.dtype))
                    self._begun[block] = _Begun(block, memory, data, patches, block.num_elements)
                    self._in_memory += 1
            self.most_begun = max(self.most_begun, self._in_memory)

    def _read(self, reading: Reading, writers: Executor) -> None:
        reading.give(reading.blocks)
        with suppress(IndexError):
            while True:
                self._start(self._writing, writers, partial(self._write, self._complete.popleft()))

    def fill(self, blocks: Iterable[FileBlock], view: str, patches: Sequence[Patch]) -> None:
        """Copy into blocks of one tensor the elements that patches of one of its views share with them."""
        begun = [one for block in blocks if (one := self._begun.get(block))]  # the others had all of their elements
        common = [list(common_parts(patches, one.patches[view])) for one in begun]
        copy_elements(chain.from_iterable(common))
        with self._changed:
            for one, copied in zip(begun, common, strict=True):
                one.missing -= sum(target.numel() for target, _ in copied)
                if copied and not one.missing:  # of a block without a copy, another reading may have had the last ones
                    self._written.add(one.block)
                    self._complete.append(self._begun.pop(one.block))

    def _write(self, one: _Begun) -> None:
        tensor = one.block.tensor
        if tensor.checked:
            one.block.crc = crc32(one.data)
        tensor.file.write(tensor.place + one.block.start * tensor.dtype.itemsize, one.data.numpy().data)
        with self._changed:
            self._free.append(one.memory)
            self._in_memory -= 1


def in_passes(readings: Sequence[Reading], most_blocks: int) -> Iterator[Reading]:
    """The readings unchanged, if ``most_blocks`` blocks in memory suffice for reading each source once.

    Otherwise they are repeated: each time they fill as many blocks as memory holds, and what has nothing for these is
    not read.
    """
    if _most_begun(readings) <= most_blocks:
        yield from readings
        return
    blocks = list(dict.fromkeys(block for reading in readings for block in reading.blocks))
    for first in range(0, len(blocks), most_blocks):
        wanted = set(blocks[first : first + most_blocks])
        for reading in readings:
            if some := [block for block in reading.blocks if block in wanted]:
                yield replace(reading, blocks=some)


def _most_begun(readings: Sequence[Reading]) -> int:
    """The most blocks in memory at once, if each reading begins when the one before it has ended."""
    left = Counter(block for reading in readings for block in reading.blocks)
    begun: set[FileBlock] = set()
    most = 0
    for reading in readings:
        begun.update(reading.blocks)
        most = max(most, len(begun))
        left.subtract(reading.blocks)
        begun.difference_update([block for block in reading.blocks if not left[block]])
    return most
