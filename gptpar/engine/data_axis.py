"""A process's place on the data axis, as sharding sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class DataAxis:
    """The data-parallel processes and how far they share state.

    Attributes:
        group: ``None`` when alone.
        zero_stage: 0: every process holds everything; 1: optimizer state is sharded; 2: gradients too; 3: parameters
            too.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    zero_stage: int = 0

    @property
    def shards(self) -> int:
        """Pieces into which optimizer state is cut."""
        return self.size if self.zero_stage else 1

    @property
    def shard(self) -> int:
        """The piece this process owns."""
        return self.rank if self.zero_stage else 0
