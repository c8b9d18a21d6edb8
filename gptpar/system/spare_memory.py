"""Host memory that copies borrow and give back, so that the system need not zero its pages again.

The system zeroes each page of new memory when it is first written. That is several times slower than the copy itself,
and whoever is about to overwrite the original waits meanwhile.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

import torch

from gptpar.system import pages


class SpareMemory:
    """Blocks of host memory by their size; safe to use from several threads.

    Args:
        limit: bytes beyond which free blocks go back to the system; lent blocks stay lent.

    Attributes:
        limit: as given, or as set anew.
        num_bytes: of all blocks, lent or not.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.num_bytes = limit, 0
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of any contents: a block that was given back, or a new one.

        Raises:
            MemoryError, OSError, RuntimeError: the system has no more.
        """
        with self._lock:
            if self._free[num_bytes]:
                return self._free[num_bytes].pop()
            self._shrink_to(self.limit - num_bytes)
            self.num_bytes += num_bytes
        try:
            return pages.untouched(num_bytes)
        except BaseException:
            with self._lock:
                self.num_bytes -= num_bytes
            raise

    def give_back(self, block: torch.Tensor) -> None:
        """Let others take a block that :meth:`take` returned."""
        with self._lock:
            self._free[block.numel()].append(block)
            self._shrink_to(self.limit)

    def limit_to(self, num_bytes: int) -> None:
        """Set another limit, and give free blocks beyond it back to the system."""
        with self._lock:
            self.limit = num_bytes
            self._shrink_to(num_bytes)

    def _shrink_to(self, num_bytes: int) -> None:
        """Give free blocks back to the system until no more than this is left, as far as there are any."""
        for size, blocks in self._free.items():
            while blocks and self.num_bytes > num_bytes:
                blocks.pop()
                self.num_bytes -= size

    def prepare(self, sizes: Iterable[int]) -> threading.Thread:
        """Make blocks of these sizes, up to the limit, in a thread that touches each page once."""
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
