"""The least time of a step: what products, the bus and the CPU's pass take by themselves at measured rates. Pure.

The three can run at the same time. A step cannot be shorter than the longest of them, however well the rest is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.engine.ranges import Home
from gptpar.plan import host_updates
from gptpar.plan.hardware import BUS, BUS_BOTH_WAYS, Cluster
from gptpar.plan.job import Job, StagePart
from gptpar.plan.memory import staying, summed_on_host


@dataclass(frozen=True)
class Floors:
    """Seconds of a step.

    Attributes:
        products: products and attention of the slowest stage, without recomputation.
        bus: gradients to the host, weights from it, activations both ways.
        host: the CPU's updates, and its sums over micro-batches where it has them.
    """

    products: float
    bus: float
    host: float

    @property
    def longest(self) -> float:
        """The least time of a step."""
        return max(self.products, self.bus, self.host)


def floors(job: Job, cluster: Cluster) -> Floors:
    """The floors of a job on a cluster."""
    parts, s = dict.fromkeys(job.stages), cluster.sustained
    update = host_updates.speed_of(job, cluster).update if job.ratio else 0.0
    rate = min(s.host_rate, s.host_rate_together / min(cluster.gpus_per_node, job.mesh.world_size))
    addition = job.num_micro_batches * host_updates.addition_bytes(job) / rate
    return Floors(
        products=job.num_micro_batches * max(_products(job, cluster, part) for part in parts),
        bus=max(_bus(job, part) for part in parts),
        host=max(update * job.table(part).length(Home.HOST) + addition * summed_on_host(job, part) for part in parts),
    )


def _products(job: Job, cluster: Cluster, part: StagePart) -> float:
    """Seconds of a stage's products and attention for a micro-batch: forward, and gradients of inputs and weights."""
    s, costs = cluster.sustained, [job.costs[number] for number in part.layers]
    multiplied = sum(6 * product.inner * product.columns for cost in costs for product in cost.products)
    attention = sum(cost.attention for cost in costs) * (1 / s.attention_forward + 2.5 / s.attention_backward)
    return job.tokens * (multiplied / s.products + attention) / cluster.peak


def _bus(job: Job, part: StagePart) -> float:
    """Seconds of a process's transfers in a step: of one direction, or of both together, whichever takes longer."""
    table = job.table(part)
    up = float(table.length(Home.HOST))
    down = up + (job.num_micro_batches - 1) * summed_on_host(job, part)
    down, up = down * job.offloaded_gradient_size, up * job.element_size
    if job.config.offload.cpu_parameters:  # forward and backward bring weights, the CPU's own stay with it
        passes = 2 * job.num_micro_batches - (job.num_micro_batches - 1) * staying(job, part)
        up = passes * table.length() * job.element_size
    activations = job.num_micro_batches * sum(job.bytes_to_host(part))
    down, up = down + activations, up + activations
    return max(down / BUS, up / BUS, (down + up) / BUS_BOTH_WAYS)
