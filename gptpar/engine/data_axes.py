"""``DataAxes``: the processes that hold copies of a unit, which sum its gradient, and among which ZeRO shards it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from gptpar.engine.ranges import Place
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import COPIES


def wait_without_limit(work: Any) -> None:
    """Wait for a collective as long as torch does."""
    work.wait()


@dataclass(frozen=True)
class DataAxes:
    """A process's place, and its groups on the mesh's axes.

    The processes that hold copies of a unit are the ones that read different samples for it. So one reduction both sums
    the unit's gradient and leaves each process its shard.

    Attributes:
        place: this process's; it says what ZeRO shards.
        groups: rows -> this process's group on them. That of ``unit.copies_over`` holds a unit; without one, this
            process alone holds it.
        wait_for: waits for an asynchronous collective. On a GPU it makes the current stream wait, not the host.
    """

    place: Place = Place()
    groups: Mapping[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    wait_for: Callable[[Any], None] = wait_without_limit

    @staticmethod
    def of(topology: Topology, zero_stage: int, wait_for: Callable[[Any], None] = wait_without_limit) -> DataAxes:
        """The place and groups in a topology; where one process reads all samples, nothing is sharded."""
        stage = zero_stage if topology.mesh.size(*COPIES) > 1 else 0
        return DataAxes(Place(topology.mesh, topology.rank, stage), topology.groups, wait_for)

    @property
    def is_alone(self) -> bool:
        """Whether this process holds the only copy of every unit: it exchanges no gradients."""
        return self.place.mesh.size(*COPIES) == 1

    @property
    def zero_stage(self) -> int:
        """0: every process holds everything; 1: optimizer state is sharded; 2: gradients too; 3: parameters too."""
        return self.place.zero_stage
