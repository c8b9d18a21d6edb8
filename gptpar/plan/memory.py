"""Predicts the memory of each stage's processes at the peak of a step.

Weights, gradients and optimizer state are counted from the very units that the run lays out; activations by the bytes
that each block says it keeps (:class:`~gptpar.tensor_parallel.cost.Cost`) times the micro-batches that the schedule
holds at once. What lives only for a moment is counted where the sum is largest: in the output layer's loss, in a
block's backward, at the step's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from operator import mul

from gptpar.engine.ranges import Home
from gptpar.engine.reducer import MAX_IN_FLIGHT
from gptpar.offload.copying_transfers import copying_bytes, max_bytes_waiting
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.offload.host_sums import sums_bytes
from gptpar.plan.hardware import SUSTAINED, Sustained
from gptpar.plan.job import Groups, Job, StagePart, alive
from gptpar.plan.states import gradient_bytes
from gptpar.tensor_parallel.cross_entropy import ROW_PIECES
from gptpar.tensor_parallel.linear_ops import FUSED_BYTES

BOUNDARIES_IN_FLIGHT = 3
"""Messages between stages that exist beside the activations: two begun receives and what is being sent."""
PRODUCT_WORKSPACE = 64 << 20
"""Bytes that the library of matrix products asks for: 32 MiB on each of two streams (Hopper)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process, by purpose.

    Attributes:
        parameters: model parameters, in the number format of the products.
        gradients: fp32 sums over micro-batches; gradients that are no sums, in their own format; and gradients that the
            host has not used yet.
        optimizer: fp32 master weights and the optimizer's state.
        activations: kept for the backward pass, of all micro-batches in flight.
        buffers: what exists for a moment only, at the worst moment: logits, gradients in flight, gathered weights.
        outside: what the device holds beside the tensors: context, communication, the allocator's gaps.
        host: the process's part of the machine's memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    outside: float
    host: float

    @property
    def allocated(self) -> float:
        """All tensors together, as ``torch.cuda.max_memory_allocated`` reports it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> float:
        """Bytes that the GPU must have."""
        return self.allocated + self.outside

    def as_gib(self) -> dict[str, float]:
        """The parts in GiB."""
        return {name: round(size / 2**30, 3) for name, size in asdict(self).items()}


def stage_memory(job: Job, stage: int, sustained: Sustained = SUSTAINED) -> RankMemory:
    """Memory of the processes of one stage."""
    return _memory(job, stage, _Part.of(job, job.stages[stage]), sustained)


def memory_of_stages(job: Job, sustained: Sustained = SUSTAINED) -> list[RankMemory]:
    """:func:`stage_memory` of every stage; what stages with the same layers have alike is counted once."""
    parts = {part: _Part.of(job, part) for part in dict.fromkeys(job.stages)}
    return [_memory(job, stage, parts[part], sustained) for stage, part in enumerate(job.stages)]


@dataclass(frozen=True)
class _Part:
    """Bytes that are the same in all stages with the same layers.

    Attributes:
        parameters, gradients, optimizer: see :class:`RankMemory`.
        host: the optimizer and the parameters in the machine's memory.
        kept: for each virtual stage, what it keeps of a micro-batch on the device.
        peaks: the instants of a step at which the sum may be largest.
    """

    parameters: float
    gradients: float
    optimizer: float
    host: float
    kept: tuple[float, ...]
    peaks: tuple[_Peak, ...]

    @staticmethod
    def of(job: Job, part: StagePart) -> _Part:
        groups = job.recomputed(part)
        kept = _kept(job, part, groups)
        here = tuple(sum(kept[number] for number in layers if number in kept) for layers in part.virtual_stages)
        peaks = tuple(_peaks(job, part, groups, kept))
        return _Part(*_states(job, part), here, peaks)


def _kept(job: Job, part: StagePart, groups: Groups) -> dict[int, float]:
    """Block -> bytes of a micro-batch on the device; of a recomputed group, the first block keeps the input."""
    on_device = 0.0 if job.config.recompute.checkpoint_in_cpu else job.recomputed_input_bytes
    tokens, costs = job.tokens, job.costs
    kept = {number: tokens * costs[number].kept * (number not in job.offloaded) for number in job.blocks(part)}
    for group in chain(*groups):
        kept |= dict.fromkeys(group, 0.0) | {group[0]: on_device}
    return kept


@dataclass(frozen=True)
class _Peak:
    """Bytes that exist together at one instant of a step.

    Attributes:
        leaving: gradients that go to the host.
        activations: saved activations that are still kept; ``None``: all.
        buffers: see :class:`RankMemory`.
    """

    leaving: float
    activations: float | None
    buffers: float


def _memory(job: Job, stage: int, part: _Part, sustained: Sustained) -> RankMemory:
    counts = alive(stage, job.mesh.pipeline, job.num_micro_batches, job.num_virtual_stages)
    most = max(sum(map(mul, count, part.kept)) for count in counts)
    peaks = ((one.leaving, most if one.activations is None else one.activations, one.buffers) for one in part.peaks)
    leaving, activations, buffers = max(peaks, key=sum)
    gradients = part.gradients + leaving
    on_gpu = job.device_type == "cuda"
    buffers += _boundary_buffers(job, stage) + on_gpu * (PRODUCT_WORKSPACE + _moving(job, stage))
    allocated = part.parameters + gradients + part.optimizer + activations + buffers
    return RankMemory(
        parameters=part.parameters,
        gradients=gradients,
        optimizer=part.optimizer,
        activations=activations,
        buffers=buffers,
        outside=on_gpu * (sustained.outside + sustained.fragmentation * allocated + _symmetric_memory(job)),
        host=sustained.host_process + activations_on_host(job, stage) + part.host,
    )


def activations_on_host(job: Job, stage: int) -> float:
    """Bytes of host memory that a stage's process needs for activations."""
    sizes = job.bytes_to_host(job.stages[stage])
    counts = alive(stage, job.mesh.pipeline, job.num_micro_batches, job.num_virtual_stages)
    return max(sum(map(mul, count, sizes)) for count in counts) if any(sizes) else 0.0


def _elements(job: Job, part: StagePart) -> tuple[int, int]:
    """(whole, this process's shard) of the elements of a stage's units."""
    shard = job.table(part).length()
    return shard * job.shards, shard


def _states(job: Job, part: StagePart) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients and optimizer state on the device, and of all that is on the host."""
    whole, shard = _elements(job, part)
    size, offload = job.element_size, job.config.offload
    parameters = 0 if job.masters_are_parameters else size * (shard if job.zero_stage == 3 else whole)
    there, state = job.table(part).length(Home.HOST), job.host_state(part)
    gradients = gradient_bytes(
        job.table(part), job.gradient_size, job.zero_stage, job.num_micro_batches, host_sums=job.host_sums
    )
    host = float(state.num_bytes + state.elements * state.element_bytes * (offload.offload_speculation == "on"))
    host = 0.0 if offload.optimizer_nvme_path else host
    if job.host_sums:
        host += host_sums_bytes(job, part)
    elif job.gradients_leave_at_once:
        host += copying_bytes(there, job.offloaded_gradient_size, job.num_offloaded_units(part))
    elif job.ratio and job.device_type == "cuda":
        host += RING_BYTES
    host += size * job.early_elements  # their weights' values are kept
    if offload.cpu_parameters:
        parameters, host = 0, host + size * shard
    return parameters, float(gradients), float(job.device_state_bytes(part)), host


def summed_on_host(job: Job, part: StagePart) -> int:
    """Number of a stage's elements whose gradients the host adds up over micro-batches."""
    return sum(job.table(part).summed_on_host(job.host_sums).values())


def copied_size(job: Job) -> int:
    """Bytes of an element of the widest gradient that is copied to the CPU: sums are wide."""
    sums = job.host_sums < 1 or job.num_copies * job.mesh.pipeline > 1
    return job.wide_size if sums and job.config.batch.adds_gradients(job.mesh.world_size) else job.element_size


def host_sums_bytes(job: Job, part: StagePart) -> int:
    """Bytes of host memory for a stage's sums over micro-batches, and for the ring through which gradients come."""
    return sums_bytes(summed_on_host(job, part), job.wide_size, copied_size(job))


def _peaks(job: Job, part: StagePart, groups: Groups, kept: Mapping[int, float]) -> Iterator[_Peak]:
    """The instants at which gradients on their way to the host, activations and buffers may take most memory.

    A gradient for the host stays on the device until the host has used it or, where gradients leave at once, until it
    is copied; a sum over micro-batches stays in the memory where it was formed. The device updates the first layers.
    Their activations are still kept when all gradients for the host exist. A tied embedding's partial gradient exists
    together with all activations.

    Args:
        groups: the groups of blocks that are recomputed together.
        kept: block -> bytes of a micro-batch's activations.
    """
    size = job.offloaded_gradient_size
    there = job.table(part).length(Home.HOST)
    leaving = size * (there if job.num_micro_batches == 1 or job.host_sums else job.early_elements)
    # One micro-batch needs no sums: gradients of units outside of the host's share wait on the device for the CPU.
    waiting = job.wide_size * (there - summed_on_host(job, part)) * (job.num_micro_batches == 1 and job.host_sums > 0)
    loss, backward, end = _loss_buffers(job, part), _backward_buffers(job, part, groups), _end_buffers(job, part)
    most = max(loss, backward, end)
    if job.gradients_leave_at_once:
        lengths = job.gradient_lengths(part)
        yield _Peak(0.0, None, loss)
        yield _Peak(waiting + min(leaving, max_bytes_waiting(lengths, size) + max(lengths) * size), None, backward)
    elif not job.graph:
        yield _Peak(job.early_elements * size, None, most)
        table = job.table(part)
        shares = {n: table.on_device[job.layers.name(n)] / max(1, job.unit(n).shard_length) for n in kept}
        yield _Peak(leaving, sum(size * shares[n] for n, size in kept.items()), max(backward, end))
    else:
        yield _Peak(leaving, None, most)  # a recorded step has their memory all the time


def _loss_buffers(job: Job, part: StagePart) -> float:
    """The output layer's buffers in its forward pass: inputs, and a chunk of tokens' logits with their gradients."""
    head = job.head(part)
    if head is None:
        return 0.0
    size, wide, cost = job.element_size, job.wide_size, job.costs[head]
    (product,) = cost.products
    hidden, gradient = job.tokens * product.inner * size, product.inner * product.columns
    logits = -(-job.tokens // cost.chunks) * product.columns * size
    in_place = job.device_type == "cuda" and size <= 4  # the logits' gradient takes their memory
    work: float = max((1 if in_place else 2) * logits, logits + gradient * size)
    if cost.chunks == 2:
        work += gradient * size
    elif cost.chunks > 2:  # the first chunk's part, a sum in the wide format, and a piece of the second chunk's
        work += gradient * (wide + size / ROW_PIECES)
    inputs = (2 if job.token_splits == 1 else 2 / job.token_splits + 1) * hidden
    return inputs + hidden + work + _gathered(job, (head, head - 1))


def _backward_buffers(job: Job, part: StagePart, groups: Groups) -> float:
    """A block's buffers in its backward pass: gradients of activations and weights, and what it recomputes."""
    size, blocks, head = job.element_size, job.blocks(part), job.head(part)
    hidden = job.tokens * job.shape.hidden_size * size
    stream = 2 * hidden / job.token_splits + (hidden if job.token_splits > 1 else 0)
    again: dict[int, float] = {}
    for group in chain(*groups):
        again |= dict.fromkeys(group, sum(map(job.kept, group)))
    following = zip(blocks, [*blocks[1:], *blocks[:1]], strict=True)
    kinds, most = job.layers.kinds, 0.0
    distinct = {(kinds[one], kinds[other], again.get(one, 0.0)): (one, other) for one, other in following}
    for (*_, recomputed), layers in distinct.items():
        unit = job.unit(layers[0])
        buffers = stream + job.tokens * job.costs[layers[0]].workspace + unit.length * size + recomputed
        if job.zero_stage >= 2 or (job.host_sums and job.num_copies > 1):
            buffers += (1 + MAX_IN_FLIGHT) * (unit.length + unit.shard_length) * job.wide_size
        most = max(most, buffers + _gathered(job, layers))
    if head is not None and job.shape.tied:  # its gradient is complete before the blocks' are, and its weights stay
        most += job.unit(head).length * size + _gathered(job, (head,))
    return most


def staying(job: Job, part: StagePart) -> float:
    """Share of a stage's weights that stay on the device from a backward pass to the next forward pass.

    Weights that came from the host stay as far as the activations, which the backward pass has freed, took memory.
    """
    if not job.config.offload.cpu_parameters or job.zero_stage > 0:
        return 0.0
    kept = sum(_kept(job, part, job.recomputed(part)).values())
    return min(1.0, kept / (job.table(part).length() * job.element_size))


def _gathered(job: Job, layers: Iterable[int]) -> float:
    """Weights that ZeRO-3 has gathered, or that came from the host."""
    if job.zero_stage < 3 and not job.config.offload.cpu_parameters:
        return 0.0
    return float(sum(job.unit(number).length for number in layers) * job.element_size)


def _end_buffers(job: Job, part: StagePart) -> float:
    """Buffers at the end of the step: reduced shards that have not been copied yet, sums in a narrower format."""
    whole, shard = _elements(job, part)
    travelling = 2 if job.config.parallel.grad_reduce_in_bf16 else job.wide_size
    arriving = travelling * shard if job.zero_stage == 1 else 0
    narrow = 2 * whole if travelling < job.wide_size and job.num_copies > 1 and job.zero_stage < 2 else 0
    return arriving + narrow


def _boundary_buffers(job: Job, stage: int) -> float:
    """Messages between stages; a recorded step cannot reuse the memory of one that it has received."""
    if job.mesh.pipeline == 1:
        return 0.0
    count = float(BOUNDARIES_IN_FLIGHT)
    if job.graph:
        last, virtual = stage == job.mesh.pipeline - 1, job.num_virtual_stages
        received = (virtual - (stage == 0)) + (virtual - last)  # by all virtual stages, for a micro-batch
        still = max(map(sum, alive(stage, job.mesh.pipeline, job.num_micro_batches, virtual))) / virtual
        count += max(0.0, job.num_micro_batches - still) * received
    return count * job.boundary_bytes


def _moving(job: Job, stage: int) -> float:
    """Saved activations that are on their way to the host or back, and those of the block that runs.

    Without a pipeline, nothing leaves while something else returns. The input of a block that is recomputed is counted
    with the rest of the recomputation.
    """
    at_once, part = 1 if job.mesh.pipeline == 1 else 2, job.stages[stage]
    saved = [job.kept(number) for number in part.layers if number in job.offloaded]
    if saved:
        return (at_once + 1) * max(saved)
    return at_once * job.recomputed_input_bytes * any(job.bytes_to_host(part))


def _symmetric_memory(job: Job) -> float:
    """The workspace of fused transfers, where activations are large enough for them; torch does not allocate it."""
    gathered = job.tokens * job.shape.hidden_size * job.element_size
    fused = job.token_splits > 1 and job.config.parallel.tp_comm_overlap and gathered >= FUSED_BYTES
    return 2.0 * gathered if fused else 0.0
