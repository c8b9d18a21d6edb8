"""The cost of the memory mirror (``--mirror-interval``): host memory, and time of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.checkpoint.ring import COPIES, Ring
from gptpar.engine.units import Unit
from gptpar.optim.group_ranges import GroupRange
from gptpar.plan.hardware import Cluster
from gptpar.plan.job import Job
from gptpar.plan.states import state_bytes
from gptpar.topology.mesh import PIPELINE


@dataclass(frozen=True)
class MirrorCost:
    """The cost of copies in memory: bytes of the largest process and of the largest machine, seconds of a step.

    Attributes:
        interval: number of steps between copies.
        process: bytes that a process writes for one copy: its part of the weights and of the optimizer's state.
        machine: bytes of host memory of all copies that a machine keeps, its neighbour's among them.
        step_s: seconds a step in which the state on the GPU is copied to the host, and training waits.
        sent_s: seconds in which one copy reaches the neighbour while training goes on; 0 for a machine alone.
    """

    interval: int
    process: float
    machine: float
    step_s: float
    sent_s: float


def mirror_cost(job: Job, cluster: Cluster) -> MirrorCost | None:
    """The cost of a job's copies in memory; ``None``: it makes none."""
    interval, mesh = job.config.recovery.mirror_interval, job.mesh
    if interval is None:
        return None
    of_stage = [sum(_bytes(job, unit) for unit in job.table(part).units) / job.num_copies for part in job.stages]
    of_rank = [of_stage[mesh.position(rank, PIPELINE)] for rank in range(mesh.world_size)]
    ring = Ring.of([str(rank // cluster.gpus_per_node) for rank in range(mesh.world_size)])
    kept = [sum(of_rank[rank] for rank in ring.kept_by(machine)) for machine in range(len(ring.machines))]
    process, speeds = max(of_rank), cluster.sustained
    network = min(speeds.socket, speeds.link * cluster.network_bandwidth)
    return MirrorCost(
        interval=interval,
        process=process,
        machine=COPIES * max(kept),
        step_s=(1 - job.ratio) * process / speeds.bus / interval,
        sent_s=0.0 if ring.is_alone else process / network,
    )


def _bytes(job: Job, unit: Unit) -> int:
    """Bytes of a whole unit's master weights and optimizer states."""
    group_ranges = [GroupRange(param.start, param.end, param.group) for param in unit.params.values()]
    return state_bytes(group_ranges, job.updates, unit.length, job.wide_size)
