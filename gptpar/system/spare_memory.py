"""Lends host memory to copies and takes it back, so that the system need not zero its pages again.

The system zeroes each page of new memory when it is first written. That is several times slower than the copy itself,
and the training step that is about to overwrite the original waits meanwhile. So blocks keep their pages between two
saves, even if the saves are hours apart. Pages that were given back would have to be zeroed again just when the next
save needs them. Pages go back only when the machine is short of memory (:meth:`SpareMemory.limit_to`).

Linux allows a process 65,530 mappings by default (``vm.max_map_count``). With one mapping for each block of 8 MiB a
process would reach that limit at a few hundred GB. So blocks are cut from large mappings. A mapping stays when pages of
its blocks go back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

import torch

from gptpar.system import pages

MAPPING_BYTES = 256 << 20
"""Size of the mappings that blocks are cut from; a larger block has a mapping of its own."""


class SpareMemory:
    """Blocks of host memory by their size; safe to use from several threads.

    Args:
        limit: bytes beyond which free blocks go back to the system; lent blocks stay lent.

    Attributes:
        limit: the given limit, or that of :meth:`limit_to`.
        num_bytes: bytes of all blocks that may have pages, lent or free.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.num_bytes = limit, 0
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._empty: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Blocks without pages: only their addresses are left."""
        self._uncut = pages.untouched(0)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """A block, [num_bytes] uint8 of any contents: one that was given back, or a new one.

        Raises:
            MemoryError, OSError, RuntimeError: the system has no more memory.
        """
        with self._lock:
            if self._free[num_bytes]:
                return self._free[num_bytes].pop()
            self._shrink_to(self.limit - num_bytes)
            empty = self._empty[num_bytes]
            block = empty.pop() if empty else self._cut(num_bytes)
            self.num_bytes += num_bytes
            return block

    def _cut(self, num_bytes: int) -> torch.Tensor:
        """Cut a new block from a mapping; its pages are untouched."""
        size = pages.whole_pages(num_bytes)
        if size > self._uncut.numel():
            self._uncut = pages.untouched(max(size, MAPPING_BYTES))
        block, self._uncut = self._uncut[:num_bytes], self._uncut[size:]
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block of :meth:`take`, so that it can be taken again."""
        with self._lock:
            self._free[block.numel()].append(block)
            self._shrink_to(self.limit)

    def limit_to(self, num_bytes: int) -> None:
        """Set another limit, and give free blocks beyond it back to the system."""
        with self._lock:
            self.limit = num_bytes
            self._shrink_to(num_bytes)

    def _shrink_to(self, num_bytes: int) -> None:
        """Give pages of free blocks back to the system until at most ``num_bytes`` are left, or no block is free."""
        for size, blocks in self._free.items():
            while blocks and self.num_bytes > num_bytes:
                pages.release(blocks[-1])
                self._empty[size].append(blocks.pop())
                self.num_bytes -= size

    def prepare(self, sizes: Iterable[int]) -> threading.Thread:
        """Begin a thread that makes blocks of these sizes, up to the limit, and touches each page once."""
        thread = threading.Thread(target=self._make, args=(list(sizes),), name="gptpar-spare-memory", daemon=True)
        thread.start()
        return thread

    def _make(self, sizes: list[int]) -> None:
        blocks = []
        try:
            for size in sizes:
                if self.num_bytes + size > self.limit:
                    break
                blocks.append(self.take(size))
                pages.touch(blocks[-1])
        except (MemoryError, OSError, RuntimeError):
            pass  # copies make do with the blocks so far
        for block in blocks:
            self.give_back(block)
