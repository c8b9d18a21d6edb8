"""``DataAxis``: this process's place on the data axis, and what ZeRO shards over it."""

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
    """The data-parallel processes, and what ZeRO shards over them.

    One axis serves both batches and shards: the processes that read different samples are the ones that hold equal
    copies of the parameters, so one reduction both sums the gradients and leaves each process its shard.

    Attributes:
        size: number of processes.
        rank: this process's position on the axis.
        group: ``None`` when alone.
        zero_stage: 0: every process holds everything; 1: optimizer state is sharded; 2: gradients too; 3: parameters
            too.
        wait_for: waits for an asynchronous collective. On a GPU it makes the current stream wait, not the host.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    zero_stage: int = 0
    wait_for: Callable[[Any], None] = wait_without_limit

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer state."""
        return self.size if self.zero_stage else 1

    @property
    def shard(self) -> int:
        """Index of the shard that this process owns."""
        return self.rank if self.zero_stage else 0
