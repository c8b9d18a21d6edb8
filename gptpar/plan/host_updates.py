"""Predicts how long a step waits for the CPU optimizer, by simulating one step as the optimizer runs it. Pure.

The simulation follows :mod:`gptpar.offload.host_optimizer`. It begins with the backward pass, when the CPU is idle: the
forward pass before has waited for all of its updates. Gradients become final from the last layer to the first, and are
copied one after the other. If the CPU may speculate, it updates, among the layers whose gradients are copied, the one
that the next forward pass needs first. When the norm is known, it updates the rest in the order of the forward pass, in
which each layer waits for its own update. A tied embedding's partial gradient comes before all others; the rows that
were looked up are updated after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gptpar.offload.buckets import BUCKET_ELEMENTS
from gptpar.offload.copying_transfers import copying_bytes, max_bytes_waiting
from gptpar.offload.gpu_transfers import RING_BYTES, SUMMED_PART
from gptpar.offload.machine import KEPT_FREE
from gptpar.plan.hardware import Cluster
from gptpar.plan.job import Job, StagePart
from gptpar.plan.memory import activations_on_host, host_sums_bytes, summed_on_host

WEIGHT_BYTES = 2
"""Bytes of the 16-bit weight that an update writes to host memory. It also reads the gradient, and reads and writes the
master weight and the states."""


ADDING_SHARE = 0.9
"""Fraction of the host's rate that additions of gradients reach: 0.59 s for a 6.7B model beside an H100."""


@dataclass(frozen=True)
class Layer:
    """One layer of a stage.

    Attributes:
        forward, backward: seconds for a micro-batch.
        elements: number of elements that the CPU updates.
        late: number of elements in the looked-up rows of a tied embedding, whose gradient is final after the backward
            pass; that of its other elements is final at the beginning. ``None``: all elements' gradients are final
            together.
    """

    forward: float
    backward: float
    elements: float = 0.0
    late: float | None = None

    @property
    def buckets(self) -> int:
        """Number of buckets in which the elements are updated."""
        return math.ceil(self.elements / BUCKET_ELEMENTS)


@dataclass(frozen=True)
class HostSpeed:
    """Speed of the CPU optimizer and of its connection to the device.

    Attributes:
        update: seconds for an element, in place.
        speculate: seconds for an element, into a double buffer.
        pause: seconds between two buckets.
        fetch: seconds for copying an element of the gradient to the host.
        send: seconds for copying a parameter to the device.
    """

    update: float
    speculate: float
    pause: float
    fetch: float
    send: float

    def bucket(self, layer: Layer, seconds_an_element: float) -> float:
        """Seconds for one of a layer's buckets."""
        return layer.elements / layer.buckets * seconds_an_element + self.pause

    def ahead(self, layer: Layer) -> float:
        """Seconds for speculating on one of a layer's buckets."""
        return (layer.elements - (layer.late or 0.0)) / layer.buckets * self.speculate + self.pause

    def rest(self, layer: Layer) -> float:
        """Seconds for the rest of a bucket whose other elements were speculated."""
        return 0.0 if layer.late is None else layer.late / layer.buckets * self.speculate + self.pause


def layers_of(job: Job, part: StagePart, times: Sequence[tuple[float, float]]) -> list[Layer]:
    """A stage's layers in forward order. The device updates the first elements, the CPU the others.

    Args:
        times: seconds of each layer's forward and backward.
    """
    table = job.table(part)
    offloaded = {unit.name: float(unit.shard_length - table.on_device[unit.name]) for unit in table.units}
    names = map(job.layers.name, part.layers)  # a tied LM head has the embedding's, which comes first
    layers = [Layer(*time, offloaded.pop(name, 0.0)) for name, time in zip(names, times, strict=True)]
    if job.early_elements:  # at most, each token looks up another row
        rows = min(job.tokens, job.shape.padded_vocab_size) / job.shape.padded_vocab_size
        layers[0] = replace(layers[0], late=rows * job.early_elements)
    return layers


def speculated_elements(job: Job, cluster: Cluster, part: StagePart) -> float:
    """Number of a stage's offloaded elements for which a process makes double buffers; a run decides it the same way.

    A machine's memory that is not given counts as large enough.
    """
    offload, state = job.config.offload, job.host_state(part)
    if offload.offload_speculation == "off" or offload.optimizer_nvme_path or not state.elements:
        return 0.0
    if offload.offload_speculation == "on" or cluster.host_memory is None:
        return state.elements
    free = (1 - KEPT_FREE) * (cluster.host_memory / _processes(job, cluster) - cluster.sustained.host_process)
    transfers, there = RING_BYTES, state.elements + state.later
    if job.host_sums:
        transfers = host_sums_bytes(job, part)
    elif job.gradients_leave_at_once:
        transfers = copying_bytes(there, job.offloaded_gradient_size, job.num_offloaded_units(part))
    transfers += int(activations_on_host(job, job.stages.index(part)))
    kept = job.element_size * job.early_elements
    return min(state.elements, max(0.0, free - state.num_bytes - transfers - kept) / state.element_bytes)


def update_bytes(job: Job) -> float:
    """Bytes of host memory that the update of an element reads and writes."""
    states = [job.host_state(part) for part in dict.fromkeys(job.stages)]
    elements = sum(state.elements + state.later for state in states)
    gradient = job.wide_size if job.host_sums else job.offloaded_gradient_size
    return 2 * sum(state.num_bytes for state in states) / max(1, elements) + WEIGHT_BYTES + gradient


def addition_bytes(job: Job) -> int:
    """Bytes of host memory that the addition of an element moves: its copy is written and read, and so is the sum."""
    return 2 * (job.offloaded_gradient_size + job.wide_size)


def speed_of(job: Job, cluster: Cluster) -> HostSpeed:
    """The speed on a cluster, where a machine's processes share the bandwidth of its memory."""
    s = cluster.sustained
    slower = max(1.0, _processes(job, cluster) * s.host_rate / s.host_rate_together)
    update, speculate = (slower * update_bytes(job) / rate for rate in (s.host_rate, s.host_rate_aside))
    return HostSpeed(update, speculate, s.host_pause, job.offloaded_gradient_size / s.bus, job.element_size / s.bus)


def adding(job: Job, cluster: Cluster, part: StagePart, forward: float, backward: float) -> float:
    """Seconds by which sums on the host prolong a step.

    For each element, a copy arrives, it and the sum are read, and the sum is written. The backward pass waits when the
    ring is full of gradients that the host has not added yet. What is left in it is added in the next forward pass.

    Args:
        forward, backward: seconds of the stage's passes of a micro-batch.
    """
    if not job.host_sums:
        return 0.0
    s, size = cluster.sustained, job.offloaded_gradient_size
    rate = ADDING_SHARE * min(s.host_rate, s.host_rate_together / _processes(job, cluster))
    each = summed_on_host(job, part) * max(addition_bytes(job) / rate, size / s.bus)
    return job.num_micro_batches * max(0.0, each - backward - min(forward, each / SUMMED_PART))


def _processes(job: Job, cluster: Cluster) -> int:
    """Number of the job's processes on one machine."""
    return min(cluster.gpus_per_node, job.mesh.world_size)


def max_lead(job: Job, part: StagePart) -> float:
    """Number of elements whose gradients may wait for their copies before the backward pass has to wait, too."""
    if not job.gradients_leave_at_once:
        return math.inf
    return max_bytes_waiting(job.gradient_lengths(part), 1)


def waiting(
    layers: Sequence[Layer], speculated: float, update: float, speed: HostSpeed, lead: float = math.inf
) -> float:
    """Seconds by which the CPU's updates prolong a step.

    Args:
        layers: a stage's layers, in forward order.
        speculated: number of elements that have double buffers; these are the last ones.
        update: seconds from the end of the backward pass to the next forward pass, in which the device updates its own
            elements. The CPU knows the gradient's norm when they begin.
        lead: see :func:`max_lead`.
    """
    early, copied, end = _copy_times(layers, speed, lead)
    left = [layer.buckets for layer in layers]
    free = _speculate(layers, early, left, speculated, end, speed)
    now, cpu = end + update, max(end, free)
    waited = end - sum(layer.backward for layer in reversed(layers))  # for copies of gradients
    for layer, when, buckets in zip(layers, copied, left, strict=True):
        work = (layer.buckets - buckets) * speed.rest(layer)
        work += buckets * speed.bucket(layer, speed.update) if buckets else 0.0
        if work:
            cpu = max(cpu, when) + work
            ready = cpu + layer.elements / layer.buckets * speed.send
            waited += max(0.0, ready - now)
            now = max(now, ready)
        now += layer.forward
    return waited


def _copy_times(layers: Sequence[Layer], speed: HostSpeed, lead: float) -> tuple[list[float], list[float], float]:
    """Seconds from the beginning of the backward pass until gradients are on the host.

    Returns:
        early: until the first bucket of each layer's partial gradient is there, if it has one; else as ``copied``.
        copied: until the first bucket of each layer's complete gradient is there.
        end: until the backward pass ends.
    """
    now = link = 0.0
    copied = [0.0] * len(layers)
    early: dict[int, float] = {}

    def copy(i: int) -> float:
        nonlocal link
        began = max(link, now)
        link = began + layers[i].elements * speed.fetch
        return began + layers[i].elements / layers[i].buckets * speed.fetch

    for i, layer in enumerate(layers):
        if layer.late is not None:
            early[i] = copy(i)
    for i in reversed(range(len(layers))):
        now += layers[i].backward
        if layers[i].elements:
            copied[i] = copy(i)
            now = max(now, link - lead * speed.fetch)
    return [early.get(i, when) for i, when in enumerate(copied)], copied, now


def _speculate(
    layers: Sequence[Layer], copied: Sequence[float], left: list[int], room: float, until: float, speed: HostSpeed
) -> float:
    """Simulate the updates before the norm is known, and take their buckets from ``left``.

    Args:
        copied: for each layer, seconds until its first bucket is on the host.
        left: for each layer, the number of buckets that are to be updated.
        room: number of elements that have double buffers.
        until: seconds until the norm is known.

    Returns:
        Seconds until the last of these updates is done.
    """
    allowed = [0] * len(layers)
    for i in reversed(range(len(layers))):
        if layers[i].elements:
            allowed[i] = min(left[i], int(room * layers[i].buckets // layers[i].elements))
            room -= layers[i].elements
        if room <= 0:
            break
    missing = sorted((i for i in range(len(layers)) if allowed[i]), key=lambda i: -copied[i])  # the next one last
    present: set[int] = set()
    free = 0.0
    while missing or present:
        while missing and copied[missing[-1]] <= free:
            present.add(missing.pop())
        begins = free if present else copied[missing[-1]]
        if begins >= until:
            break
        free = begins
        if present:
            shallowest = min(present)
            free += speed.ahead(layers[shallowest])
            left[shallowest] -= 1
            allowed[shallowest] -= 1
            if not allowed[shallowest]:
                present.remove(shallowest)
    return free
