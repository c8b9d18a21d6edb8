"""Puts new tensors together block by block, from sources that have their elements in another order.

Each source is read piece by piece; a piece gives every block the elements that it has for it. A block is written when
it has all of its elements, and its memory then serves another block. So memory holds the blocks that are begun: a few
where the order is nearly the same, all of a tensor's where it is transposed. A piece is read once there is room for the
blocks that it begins. Where a tensor's blocks do not fit together, its source is read more than once.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain

import torch

from gptpar.checkpoint.data_file import BUFFER_BYTES, DataFile, aligned_as, aligned_memory, piece_starts
from gptpar.checkpoint.patches import Patch, common_parts
from gptpar.system.crc32 import crc32
from gptpar.system.strided_copy import copy_elements

MAX_THREADS = 12
"""Threads that read, copy and write. A thread is in a write for about half of its time, and disks want several."""
MIN_BUFFERS = 8
"""64 MiB: what a conversion may take however small its tensors are."""

Patches = Mapping[str, Sequence[Patch]]
"""Name of a view -> its patches in a block."""


@dataclass(frozen=True)
class Room:
    """Memory of a conversion, in buffers of a piece of 8 MiB each.

    Attributes:
        threads: each has a buffer for what it reads.
        blocks: blocks that may be in memory at once.
    """

    threads: int
    blocks: int

    @staticmethod
    def within(num_bytes: int) -> Room:
        """What fits a number of bytes; at least 64 MiB are taken."""
        buffers = max(MIN_BUFFERS, num_bytes // BUFFER_BYTES)
        threads = min(MAX_THREADS, buffers // 3)
        return Room(threads, buffers - threads)


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
        memory: what the block's memory goes back as.
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

    Attributes:
        most_begun: number of blocks that were in memory at once, at most.
    """

    def __init__(self, room: Room):
        self._room, self._lock = room, threading.Lock()
        self._begun: dict[FileBlock, _Begun] = {}
        self._written: set[FileBlock] = set()  # or complete
        self._complete: deque[_Begun] = deque()
        self._free: list[torch.Tensor] = []
        self._in_memory = self.most_begun = 0

    def run(self, groups: Iterable[Sequence[Reading]]) -> None:
        """Read everything in order, and write all blocks.

        A reading begins once there is room for its blocks. When no other is under way there is room, because
        :func:`in_passes` saw to it.

        Args:
            groups: of readings; blocks of one group have all of their elements from it.
        """
        under_way: set[Future[None]] = set()
        with ThreadPoolExecutor(self._room.threads) as pool:
            try:
                for reading in (one for group in groups for one in in_passes(group, self._room.blocks)):
                    while under_way and (len(under_way) > self._room.threads or not self._has_room(reading)):
                        under_way = _wait_for_one(under_way)
                    self._begin(reading.blocks)
                    under_way.add(pool.submit(self._read, reading))
                while under_way:
                    under_way = _wait_for_one(under_way)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        assert not self._begun and not self._complete, "a block lacks elements"

    def _has_room(self, reading: Reading) -> bool:
        with self._lock:
            new = sum(block not in self._begun and block not in self._written for block in reading.blocks)
            return self._in_memory + new <= self._room.blocks

    def _begin(self, blocks: Sequence[FileBlock]) -> None:
        with self._lock:
            for block in blocks:
                if block not in self._begun and block not in self._written:
                    memory, tensor = self._free.pop() if self._free else aligned_memory(), block.tensor
                    itemsize = tensor.dtype.itemsize
                    data = aligned_as(memory, tensor.place + block.start * itemsize, block.num_bytes, itemsize)
                    patches = tensor.patches(block.start, data.view(tensor.dtype))
                    self._begun[block] = _Begun(block, memory, data, patches, block.num_elements)
                    self._in_memory += 1
            self.most_begun = max(self.most_begun, self._in_memory)

    def _read(self, reading: Reading) -> None:
        reading.give(reading.blocks)
        self._write_complete()

    def fill(self, blocks: Iterable[FileBlock], view: str, patches: Sequence[Patch]) -> None:
        """Give blocks of one tensor what patches of one of its views have for them."""
        begun = [one for block in blocks if (one := self._begun.get(block))]  # the others had all of their elements
        common = [list(common_parts(patches, one.patches[view])) for one in begun]
        copy_elements(chain.from_iterable(common))
        with self._lock:
            for one, copied in zip(begun, common, strict=True):
                one.missing -= sum(target.numel() for target, _ in copied)
                if not one.missing:
                    self._written.add(one.block)
                    self._complete.append(self._begun.pop(one.block))

    def _write_complete(self) -> None:
        """Write the blocks that are complete by now; other threads take some of them."""
        while True:
            try:
                one = self._complete.popleft()
            except IndexError:
                return
            tensor = one.block.tensor
            if tensor.checked:
                one.block.crc = crc32(one.data)
            tensor.file.write(tensor.place + one.block.start * tensor.dtype.itemsize, one.data.numpy().data)
            with self._lock:
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
    """How many blocks are in memory at once, at most, if a reading begins when the one before it has ended."""
    left = Counter(block for reading in readings for block in reading.blocks)
    begun: set[FileBlock] = set()
    most = 0
    for reading in readings:
        begun.update(reading.blocks)
        most = max(most, len(begun))
        left.subtract(reading.blocks)
        begun.difference_update([block for block in reading.blocks if not left[block]])
    return most


def _wait_for_one(under_way: set[Future[None]]) -> set[Future[None]]:
    """Wait until a reading has ended; returns those that have not.

    Raises:
        CheckpointError: it failed.
    """
    ended, others = wait(under_way, return_when=FIRST_COMPLETED)
    for one in ended:
        one.result()
    return others
