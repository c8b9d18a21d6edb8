"""Puts new tensors together block by block, from sources that have their elements in another order.

Each source is read once, piece by piece; a piece gives every block the elements that it has for it. A block is written
when it has all of its elements, and its memory then serves another block. So memory holds the blocks that are begun:
a few where the order is nearly the same, all of a tensor's where it is transposed.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gptpar.checkpoint.data_file import DataFile, aligned_as, aligned_memory, piece_starts
from gptpar.checkpoint.patches import Patch, copy_common

Patches = Mapping[str, Sequence[Patch]]
"""Name of a view -> its patches in a block."""


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
    """The blocks that are begun; several threads fill and write them.

    Attributes:
        most_begun: number of blocks that were in memory at once, at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[FileBlock, _Begun] = {}
        self._complete: deque[_Begun] = deque()
        self._free: list[torch.Tensor] = []
        self.most_begun = 0

    def fill(self, tensor: NewTensor, view: str, patches: Sequence[Patch], ranges: Iterable[tuple[int, int]]) -> None:
        """Give a tensor's blocks what patches of one of its views have for them.

        Args:
            ranges: see :meth:`NewTensor.touching`.
        """
        for block in tensor.touching(ranges):
            one = self._begin(block)
            copied = copy_common(patches, one.patches[view])
            with self._lock:
                one.missing -= copied
                if not one.missing:
                    self._complete.append(self._begun.pop(block))

    def _begin(self, block: FileBlock) -> _Begun:
        with self._lock:
            if block not in self._begun:
                memory, tensor = self._free.pop() if self._free else aligned_memory(), block.tensor
                itemsize = tensor.dtype.itemsize
                data = aligned_as(memory, tensor.place + block.start * itemsize, block.num_bytes, itemsize)
                patches = tensor.patches(block.start, data.view(tensor.dtype))
                self._begun[block] = _Begun(block, memory, data, patches, block.num_elements)
                self.most_begun = max(self.most_begun, len(self._begun) + len(self._complete))
            return self._begun[block]

    def write_complete(self) -> None:
        """Write the blocks that are complete by now; other threads take some of them."""
        while True:
            try:
                one = self._complete.popleft()
            except IndexError:
                return
            tensor, data = one.block.tensor, one.data.numpy().data
            if tensor.checked:
                one.block.crc = zlib.crc32(data)
            tensor.file.write(tensor.place + one.block.start * tensor.dtype.itemsize, data)
            with self._lock:
                self._free.append(one.memory)

    def require_empty(self) -> None:
        """Make sure that every block that was begun has been written."""
        assert not self._begun and not self._complete, "a block lacks elements"
