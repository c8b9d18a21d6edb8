"""Predicts the time of a training step from what each stage computes and sends, along the pipeline's schedule.

A stage's time for a micro-batch is the sum over its layers. Each layer says what it computes, moves and sends
(:class:`~gptpar.tensor_parallel.cost.Cost`). The speeds that these reach are in :mod:`gptpar.plan.hardware`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gptpar.engine.ranges import Home
from gptpar.pipeline import schedules
from gptpar.plan import host_updates, matrices
from gptpar.plan.hardware import BUS, BUS_BOTH_WAYS, Cluster, mfu
from gptpar.plan.job import Job, StagePart
from gptpar.plan.memory import staying
from gptpar.tensor_parallel.cost import Cost
from gptpar.tensor_parallel.linear_ops import FUSED_BYTES

KERNELS_OF_CHUNK, SUMS_OF_CHUNK = 6, 2
"""Kernels of each chunk of tokens in the LM head's loss, and its sums of a few numbers a token over the tensor axis."""
EXCHANGES = 5
"""Messages of a layer over the expert axis in the forward pass: numbers, choices, tokens, weights, outputs. The three
of the backward pass are counted as five, too."""
MAX_SIMULATED = 20_000
"""A schedule with at most this many actions is simulated to find its idle time; a longer one gets a formula."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for a micro-batch, with transfers inside the stage."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step.

    Attributes:
        stages: each stage's time for a micro-batch.
        compute: computation of the slowest stage, over all micro-batches.
        fill: filling and draining the pipeline, and the cost of stages that are not launched as one graph.
        transfers: waiting for transfers between stages.
        data: reductions and gathers over the data axis, as far as computation does not hide them.
        optimizer: norm and update on the device.
        matrices: assembling and orthogonalizing matrices (Muon).
        cpu_optimizer: waiting for the CPU's updates, if no step is clipped.
        bus: waiting for weights from the host, and for activations on their way to it and back.
        host: time by which the host launches the step's kernels longer than the device runs them.
    """

    stages: Sequence[StageTime]
    compute: float
    fill: float
    transfers: float
    data: float
    optimizer: float
    matrices: float
    cpu_optimizer: float
    bus: float
    host: float

    @property
    def total(self) -> float:
        """The whole step."""
        device = self.compute + self.fill + self.transfers + self.data + self.optimizer + self.matrices
        return device + self.cpu_optimizer + self.bus + self.host

    @property
    def idle(self) -> float:
        """Fraction of forward and backward in which a stage, on average, computes nothing."""
        busy = self.compute * sum(s.both for s in self.stages) / (len(self.stages) * max(s.both for s in self.stages))
        return max(0.0, 1 - busy / (self.compute + self.fill + self.transfers))


def step_time(job: Job, cluster: Cluster) -> StepTime:
    """Predict a step."""
    costs = _Costs(job, cluster)
    stages = [costs.stage(part) for part in job.stages]
    count, mesh = job.num_micro_batches, job.mesh
    slowest = max(stage.both for stage in stages)
    others = (sum(stage.both for stage in stages) - slowest) / max(1, mesh.pipeline - 1)
    compute = count * slowest
    fill = rounds_idle(mesh.pipeline, count, job.num_virtual_stages) * others
    transfers = rounds_transferring(mesh.pipeline, count, job.num_virtual_stages) * costs.between_stages()
    if not job.graph and mesh.pipeline > 1:
        fill += cluster.sustained.scheduling * compute
    busiest = max(range(len(stages)), key=lambda i: stages[i].both)
    parts = dict.fromkeys(job.stages)
    heaviest = max(job.table(part).length() * job.shards for part in parts)
    data = costs.data_parallel(heaviest, stages[busiest])
    optimizer = max(costs.update(part) for part in parts)
    orthogonal = max(costs.matrices(part) for part in parts)
    cpu_optimizer = max(costs.host_updates(part) for part in parts)
    bus = max(costs.bus(part) for part in parts)
    device = compute + fill + transfers + data
    host = max(0.0, max(costs.host(part) for part in parts) - device)
    return StepTime(stages, compute, fill, transfers, data, optimizer, orthogonal, cpu_optimizer, bus, host)


def rounds_idle(num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> float:
    """A stage's waiting time in a step, as a multiple of its forward and backward of one micro-batch.

    Where the formula of :func:`~gptpar.pipeline.schedules.bubble` is not exact, the schedule is simulated.
    """
    if num_virtual_stages == 1 or num_micro_batches % num_stages == 0:
        fraction = schedules.bubble(num_stages, num_micro_batches, num_virtual_stages)
        return num_micro_batches * fraction / (1 - fraction)
    few = min(num_micro_batches, num_stages + num_micro_batches % num_stages)
    if num_stages * few * num_virtual_stages > MAX_SIMULATED:
        whole = -(-num_micro_batches // num_stages) * num_stages
        return whole - num_micro_batches + (num_stages - 1) / num_virtual_stages
    return _simulated_idle(num_stages, few, num_virtual_stages)


@lru_cache(maxsize=4096)
def _simulated_idle(num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> float:
    fraction = schedules.simulated_bubble(schedules.simulate(num_stages, num_micro_batches, num_virtual_stages))
    return num_micro_batches * fraction / (1 - fraction)


def rounds_transferring(num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> float:
    """Number of transfers, one after the other, for which a step waits.

    In 1F1B a micro-batch's way through p stages and back takes ``2 (p - 1)`` transfers, and makes room for the next p
    micro-batches. With several virtual stages more micro-batches are in flight, and only the first and the last wait.
    Simulated schedules give the same numbers for whole groups of p micro-batches.
    """
    if num_stages == 1:
        return 0.0
    if num_virtual_stages == 1:
        rounds = max(num_micro_batches, num_stages)
        return 2 * (num_stages - 1) / num_stages * rounds + 2 * (num_stages - 2)
    return 2.0 * (num_stages * num_virtual_stages - 1)


class _Costs:
    """Seconds of the parts of a job's step on one rank of a cluster."""

    def __init__(self, job: Job, cluster: Cluster):
        self._job, self._cluster, self._sustained = job, cluster, cluster.sustained
        self.memory_rate = cluster.memory_bandwidth * self._sustained.memory
        self._product_rate = max(self.memory_rate, cluster.peak * self._sustained.on_chip)
        mesh = job.mesh
        self._tensor_rate = cluster.bandwidth(mesh.tensor, 1)
        self._data_rate = cluster.bandwidth(job.num_copies, mesh.tensor)
        self._context_rate = cluster.bandwidth(mesh.context, mesh.tensor)
        self._expert_rate = cluster.bandwidth(mesh.expert, mesh.tensor)
        self._times: dict[tuple[int, bool], StageTime] = {}

    def stage(self, part: StagePart) -> StageTime:
        """A stage's time for one micro-batch."""
        layers = self.layers(part)
        return StageTime(sum(layer.forward for layer in layers), sum(layer.backward for layer in layers))

    def layers(self, part: StagePart) -> list[StageTime]:
        """The times of a stage's layers, in the order of the forward pass."""
        again = {number for groups in self._job.recomputed(part) for group in groups for number in group}
        return [self._layer(number, number in again) for number in part.layers]

    def _layer(self, number: int, again: bool) -> StageTime:
        """A layer's time for one micro-batch.

        Args:
            again: whether the backward pass computes the whole layer again.
        """
        key = self._job.layers.kinds[number], again
        if key not in self._times:
            cost, gradients = self._job.costs[number], self._add_gradients(self._job.unit(number).length)
            if cost.chunks:
                self._times[key] = StageTime(self._chunked(cost), gradients)
            else:
                time = self._passes(cost)
                recomputed = time.forward * again + sum(self._passes(part).forward for part in cost.again)
                self._times[key] = StageTime(time.forward, time.backward + gradients + recomputed)
        return self._times[key]

    def _product(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of a matrix product of (rows x inner) with (inner x columns)."""
        size = self._job.element_size
        traffic = size * (rows * inner + inner * columns + rows * columns)
        compute = 2 * rows * inner * columns / (self._cluster.peak * self._sustained.products)
        return compute + traffic / self._product_rate

    def _passes(self, cost: Cost) -> StageTime:
        """Times without recomputation, and without adding gradients of parameters to their sums."""
        s, job = self._sustained, self._job
        products = sum(self._product(job.tokens, product.inner, product.columns) for product in cost.products)
        attention = job.tokens * (cost.attention + cost.masked) / self._cluster.peak
        element = job.tokens * job.element_size / self.memory_rate
        others = self._context_transfer(cost) + self._expert_transfer(cost)
        forward, backward = (there + others for there in self._tensor_transfers(cost))
        forward += products + attention / s.attention_forward + element * cost.forward + cost.forward_kernels * s.kernel
        backward += 2 * products + 2.5 * attention / s.attention_backward
        backward += element * cost.backward + cost.backward_kernels * s.kernel
        return StageTime(forward, backward)

    def _tensor_transfers(self, cost: Cost) -> tuple[float, float]:
        """Seconds that transfers over the tensor axis add to (forward, backward)."""
        splits, beside = self._job.token_splits > 1, self._sustained.overlapped
        forward = backward = cost.small_sums * self._sustained.transfer
        for product in cost.products:
            if product.moves_input:  # gathered; beside the backward's products gathered again, and its gradient summed
                moved, alone = self._transfer(product.inner)
                forward += splits * moved * alone
                backward += 2 * moved * beside
            if product.moves_output:  # summed, and its gradient gathered; or summed for all ranks
                moved, alone = self._transfer(product.columns)
                forward += moved * alone if splits else 2 * moved
                backward += splits * moved * alone
        return forward, backward

    def _context_transfer(self, cost: Cost) -> float:
        """Seconds in which attention sends heads over the context axis: half of them in each pass."""
        job, size, shape = self._job, self._job.mesh.context, self._job.shape
        if size == 1 or not cost.attention:
            return 0.0
        heads = job.config.parallel.heads_sent(shape.num_attention_heads, shape.num_query_groups)
        sent = heads[job.config.parallel.cp_comm_type] / 2 * shape.kv_channels * job.element_size
        return sent * job.tokens * (size - 1) / self._context_rate + 2 * self._sustained.transfer

    def _expert_transfer(self, cost: Cost) -> float:
        """Seconds in which tokens go to the ranks of their experts and outputs come back, in each pass."""
        if not cost.exchanged:
            return 0.0
        sent = cost.exchanged * self._job.tokens * self._job.element_size
        return sent / self._expert_rate + EXCHANGES * self._sustained.transfer

    def _transfer(self, width: int) -> tuple[float, float]:
        """(seconds for gathering all tokens' vectors or summing them, the fraction beside a product fused with it)."""
        job, size = self._job, self._job.mesh.tensor
        whole = job.tokens * width * job.element_size
        fused = job.token_splits > 1 and job.config.parallel.tp_comm_overlap and whole >= FUSED_BYTES
        moved = whole * (size - 1) / size / self._tensor_rate + self._sustained.transfer
        return moved, self._sustained.overlapped if fused else 1.0

    def _add_gradients(self, elements: int) -> float:
        """Seconds for adding gradients to their wide sums, which reads both and writes one.

        A gradient that is no sum is copied. For elements that the CPU updates, reading them for the norm counts here.
        """
        job = self._job
        added = job.element_size + 2 * job.wide_size
        size = added if job.config.batch.adds_gradients(job.mesh.world_size) else 2 * job.element_size
        alone = job.num_micro_batches == 1 and job.num_copies == 1
        size_on_host = job.host_sums * 2 * job.element_size
        size_on_host += (1 - job.host_sums) * (3 * job.element_size if alone else added)
        return elements * ((1 - job.ratio) * size + job.ratio * size_on_host) / self.memory_rate

    def _chunked(self, cost: Cost) -> float:
        """Seconds of a layer that forms its gradients in the forward pass, such as the LM head with the loss."""
        tokens, s = -(-self._job.tokens // cost.chunks), self._sustained
        chunk = 3 * sum(self._product(tokens, product.inner, product.columns) for product in cost.products)
        chunk += tokens * cost.forward * self._job.element_size / self.memory_rate + KERNELS_OF_CHUNK * s.kernel
        inputs = [product.inner for product in cost.products if product.moves_input]
        chunk += SUMS_OF_CHUNK * s.transfer * bool(inputs)
        return cost.chunks * chunk + sum(2 * moved * alone for moved, alone in map(self._transfer, inputs))

    def between_stages(self) -> float:
        """Seconds of one transfer between neighbouring stages."""
        job = self._job
        rate = self._cluster.stage_bandwidth(job.mesh.world_size)
        return job.boundary_bytes / rate + self._sustained.stage_transfer

    def data_parallel(self, elements: int, stage: StageTime) -> float:
        """Seconds that collectives over the data axis add: what computation cannot hide, and a fraction of the rest.

        Args:
            elements: number of a rank's parameters.
            stage: the stage's time for a micro-batch.
        """
        job, copies = self._job, self._job.num_copies
        if copies == 1:
            return 0.0
        size = 2 if job.config.parallel.grad_reduce_in_bf16 else job.wide_size
        seconds_a_byte = (copies - 1) / copies / self._data_rate
        reduced, gathered = elements * size * seconds_a_byte, elements * job.element_size * seconds_a_byte
        if job.zero_stage >= 2 or job.host_sums:
            gathers = 2 * gathered if job.zero_stage == 3 else 0.0
            each = self._beside(gathers + reduced, stage.both)
            published = 0.0 if job.zero_stage == 3 else self._beside(gathered, stage.forward)
            return job.num_micro_batches * each + published
        if job.zero_stage == 0:
            return self._beside(2 * reduced, stage.backward)
        return self._beside(reduced, stage.backward) + self._beside(gathered, stage.forward)

    def host_updates(self, part: StagePart) -> float:
        """Seconds for which a stage waits for the CPU's updates."""
        job = self._job
        if not job.ratio:
            return 0.0
        layers = host_updates.layers_of(job, part, [(layer.forward, layer.backward) for layer in self.layers(part)])
        room = host_updates.speculated_elements(job, self._cluster, part)
        speed, lead = host_updates.speed_of(job, self._cluster), host_updates.max_lead(job, part)
        stage = self.stage(part)
        added = host_updates.adding(job, self._cluster, part, stage.forward, stage.backward)
        return added + host_updates.waiting(layers, room, self.update(part), speed, lead)

    def update(self, part: StagePart) -> float:
        """Seconds of the optimizer's step on the device.

        It reads the gradient for the norm and for the update, reads and writes the optimizer's state, and writes the
        model's parameters.
        """
        job = self._job
        model = 0 if job.masters_are_parameters else job.element_size
        moved = (2 * job.gradient_size + model) * job.table(part).length(Home.DEVICE) + 2 * job.device_state_bytes(part)
        return moved / self.memory_rate

    def matrices(self, part: StagePart) -> float:
        """Seconds of an optimizer over matrices, besides what all optimizers do."""
        rates = [self._tensor_rate] * (self._job.mesh.tensor > 1) + [self._data_rate] * (self._job.shards > 1)
        return matrices.seconds(self._job, part, self._product, min(rates, default=math.inf))

    def bus(self, part: StagePart) -> float:
        """Seconds for which a step waits for the bus: weights come, activations leave and return.

        Activations leave and return while blocks run. In the forward pass weights come against them: all of them for
        the first micro-batch, those that did not stay for the others.
        """
        job = self._job
        weights = job.table(part).length() * job.element_size * job.config.offload.cpu_parameters
        activations = sum(job.bytes_to_host(part))
        if not weights and not activations:
            return 0.0
        layers = self.layers(part)
        if activations:
            layers = [layer for number, layer in zip(part.layers, layers, strict=True) if number in job.layers.blocks]
        rate, both_ways = self._sustained.bus, self._sustained.bus * BUS_BOTH_WAYS / BUS
        forward, backward = sum(layer.forward for layer in layers), sum(layer.backward for layer in layers)

        def in_forward(coming: float) -> float:
            leaving = max(coming / rate, activations / rate, (coming + activations) / both_ways)
            return max(0.0, leaving - forward)

        later = (job.num_micro_batches - 1) * in_forward(weights * (1 - staying(job, part)))
        in_backward = max(0.0, (weights + activations) / rate - backward)
        return in_forward(weights) + later + job.num_micro_batches * in_backward

    def _beside(self, transfer: float, compute: float) -> float:
        """Seconds that a transfer adds to a computation with which it overlaps."""
        return max(self._sustained.overlapped * transfer, transfer - (1 - self._sustained.overlapped) * compute)

    def host(self, part: StagePart) -> float:
        """Seconds for launching a step's kernels one by one on a stage."""
        job, s = self._job, self._sustained
        if job.graph:
            return 0.0
        gathers, sums = (3, 2) if job.token_splits > 1 else (1, 1)
        seconds = 0.0
        for cost in (job.costs[number] for number in job.blocks(part)):
            products = cost.products
            collectives = sum(gathers * product.moves_input + sums * product.moves_output for product in products)
            collectives += 3 if job.zero_stage == 3 else 0
            seconds += (cost.forward_kernels + cost.backward_kernels) * s.host_kernel + collectives * s.host_collective
        again = 4 / 3 if job.config.recompute.recompute_granularity == "full" else 1
        return job.num_micro_batches * again * seconds


def utilisation(job: Job, cluster: Cluster, seconds: float) -> float:
    """Model FLOPs utilisation of a step, with attention over its causal half."""
    tokens = job.config.batch.global_batch_size * job.shape.seq_length
    rate = tokens / seconds / job.mesh.world_size
    return mfu(rate, job.flops_per_token, cluster.peak) or 0.0
