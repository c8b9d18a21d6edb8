"""A process's place on the data axis, as sharding sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


def wait_without_limit(work: Any) -> None:
    """Wait for a collective as long as torch does."""
    work.wait()


@dataclass(frozen=True)
class DataAxis:
    """The data-parallel processes and how far they share state.

    Attributes:
        group: ``None`` when alone.
        zero_stage: 0: every process holds everything; 1: optimizer state is sharded; 2: gradients too; 3: parameters
            too.
        wait_for: returns when an asynchronous collective is done; on a GPU, when what follows will find it so.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    zero_stage: int = 0
    wait_for: Callable[[Any], None] = wait_without_limit

    @property
    def shards(self) -> int:
        """Pieces into which optimizer state is cut."""
        return self.size if self.zero_stage else 1

    @property
    def shard(self) -> int:
        """The piece this process owns."""
        return self.rank if self.zero_stage else 0
