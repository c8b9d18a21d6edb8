"""Predicts the memory of each stage's processes at the peak of a step.

Weights, gradients and optimizer state are counted from the very units that the run lays out; activations by the bytes
that a block keeps (:mod:`gptpar.model.memory`) times the micro-batches that the schedule holds at once. What lives only
for a moment is counted where the sum is largest: in the output layer's loss, in a block's backward, at the step's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import mul

from gptpar.config.roles import Role
from gptpar.engine.ranges import Home
from gptpar.engine.reducer import MAX_IN_FLIGHT
from gptpar.model.core_attention import has_window_kernel
from gptpar.model.dtypes import DTYPES
from gptpar.model.flops import DISTANCE_CHANNELS, distance_width, gated_width, normed_width, num_norms, window_of
from gptpar.model.memory import layer_activation_bytes_per_token
from gptpar.offload.copying_transfers import copying_bytes, max_bytes_waiting
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.plan.hardware import SUSTAINED, Sustained
from gptpar.plan.job import Job, StagePart, alive
from gptpar.plan.states import gradient_bytes
from gptpar.tensor_parallel.cross_entropy import num_chunks
from gptpar.tensor_parallel.linear_ops import FUSED_BYTES

BOUNDARIES_IN_FLIGHT = 3
"""Messages between stages that exist beside the activations: two begun receives and what is being sent."""
STATISTICS_BYTES = 8
"""Of a norm: mean and reciprocal deviation, in fp32, of each vector that it normalises."""

PRODUCT_WORKSPACE = 64 << 20
"""Bytes that the library of matrix products asks for: 32 MiB on each of two streams (Hopper)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process, by purpose.

    Attributes:
        parameters: live weights, in the number format of the products.
        gradients: their fp32 sums (those that are no sums, as they come), and those that the host has not used yet.
        optimizer: fp32 master weights and the optimizer's state.
        activations: kept for the backward pass, of all micro-batches in flight.
        buffers: what exists for a moment only, at the worst moment: logits, gradients in flight, gathered weights.
        outside: what the device holds beside the tensors: context, communication, the allocator's gaps.
        host: of the machine's memory.
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
        """What the GPU must have."""
        return self.allocated + self.outside

    def as_gib(self) -> dict[str, float]:
        """The parts in GiB."""
        return {name: round(size / 2**30, 3) for name, size in asdict(self).items()}


def stage_memory(job: Job, stage: int, sustained: Sustained = SUSTAINED) -> RankMemory:
    """Memory of the processes of one stage."""
    return _memory(job, stage, _Part.of(job, job.stages[stage], _Blocks.of(job)), sustained)


def memory_of_stages(job: Job, sustained: Sustained = SUSTAINED) -> list[RankMemory]:
    """:func:`stage_memory` of every stage; what stages with the same layers have alike is counted once."""
    blocks = _Blocks.of(job)
    parts = {part: _Part.of(job, part, blocks) for part in dict.fromkeys(job.stages)}
    return [_memory(job, stage, parts[part], sustained) for stage, part in enumerate(job.stages)]


@dataclass(frozen=True)
class _Part:
    """What all stages with the same layers have alike, in bytes.

    Attributes:
        parameters, gradients, optimizer: see :class:`RankMemory`.
        host: of the optimizer and the parameters, in the machine's memory.
        kept, kept_by_host: what each chunk keeps of a micro-batch, on the device and in the machine's memory.
        moments: when the sum may be largest.
    """

    parameters: float
    gradients: float
    optimizer: float
    host: float
    kept: tuple[float, ...]
    kept_by_host: tuple[float, ...]
    moments: tuple[_Moment, ...]

    @staticmethod
    def of(job: Job, part: StagePart, blocks: _Blocks) -> _Part:
        kept = tuple(blocks.kept(count) for count in part.blocks)
        kept_by_host = tuple(blocks.kept_by_host(count) for count in part.blocks)
        moments = tuple(_moments(job, part, blocks, sum(kept)))
        return _Part(*_states(job, part), kept, kept_by_host, moments)


@dataclass(frozen=True)
class _Moment:
    """Bytes that exist together at one moment of a step.

    Attributes:
        leaving: gradients that go to the host.
        activations: those that are still kept; ``None``: all.
        buffers: see :class:`RankMemory`.
    """

    leaving: float
    activations: float | None
    buffers: float


def _memory(job: Job, stage: int, part: _Part, sustained: Sustained) -> RankMemory:
    counts = alive(stage, job.layout.pipeline, job.num_micro_batches, job.num_virtual_stages)
    most = max(sum(map(mul, count, part.kept)) for count in counts)
    host = max(sum(map(mul, count, part.kept_by_host)) for count in counts)
    moments = ((one.leaving, most if one.activations is None else one.activations, one.buffers) for one in part.moments)
    leaving, activations, buffers = max(moments, key=sum)
    gradients = part.gradients + leaving
    on_gpu = job.device_type == "cuda"
    buffers += _boundary_buffers(job, stage) + on_gpu * PRODUCT_WORKSPACE
    allocated = part.parameters + gradients + part.optimizer + activations + buffers
    return RankMemory(
        parameters=part.parameters,
        gradients=gradients,
        optimizer=part.optimizer,
        activations=activations,
        buffers=buffers,
        outside=on_gpu * (sustained.outside + sustained.fragmentation * allocated + _symmetric_memory(job)),
        host=sustained.host_process + host + part.host,
    )


def _elements(job: Job, part: StagePart) -> tuple[int, int]:
    """(whole, this process's shard) of the elements of a stage's units."""
    shard = job.table(part).length()
    return shard * job.shards, shard


def _states(job: Job, part: StagePart) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients and optimizer state on the device, and of all that is on the host."""
    whole, shard = _elements(job, part)
    size, wide, offload = job.element_size, job.wide_size, job.config.offload
    parameters = 0 if job.masters_are_live else size * (shard if job.zero_stage == 3 else whole)
    here, there = (job.table(part).length(home) for home in (Home.DEVICE, Home.HOST))
    gradients = float(gradient_bytes(job.table(part), job.gradient_size, job.zero_stage, job.num_micro_batches))
    element_bytes = job.optimizer.state_bytes(wide)
    host = float(element_bytes * there) * (2 if offload.offload_speculation == "on" else 1)
    host = 0.0 if offload.optimizer_nvme_path else host
    if job.gradients_leave_at_once:
        host += copying_bytes(there, job.offloaded_gradient_size, job.num_offloaded_units(part))
    elif job.ratio and job.device_type == "cuda":
        host += RING_BYTES
    host += size * job.early_elements  # their weights' values are kept
    if offload.cpu_parameters:
        parameters, host = 0, host + size * shard
    return parameters, gradients, float(element_bytes * here), host


def _moments(job: Job, part: StagePart, blocks: _Blocks, of_one: float) -> Iterator[_Moment]:
    """The moments when gradients on their way to the host, activations and buffers may be most.

    Such a gradient stays on the device until the host has used it, or, where gradients leave at once, until it is
    copied; a sum over micro-batches does so where it was summed. The device keeps the first layers: when all of the
    host's gradients are there, the activations of those layers are there still. What is sent early is there together
    with all activations.

    Args:
        of_one: bytes of a micro-batch's activations.
    """
    size = job.offloaded_gradient_size
    there = job.table(part).length(Home.HOST)
    leaving = size * there if job.num_micro_batches == 1 else size * job.early_elements
    loss, backward, end = _loss_buffers(job, part), _backward_buffers(job, part, blocks), _end_buffers(job, part)
    most = max(loss, backward, end)
    if job.gradients_leave_at_once:
        lengths = job.gradient_lengths(part)
        yield _Moment(0.0, None, loss)
        yield _Moment(min(leaving, max_bytes_waiting(lengths, size) + max(lengths) * size), None, backward)
    elif not job.graph:
        yield _Moment(job.early_elements * size, None, most)
        yield _Moment(leaving, of_one * _share_of_device(job, part), max(backward, end))
    else:
        yield _Moment(leaving, None, most)  # a recorded step has their memory all the time


def _share_of_device(job: Job, part: StagePart) -> float:
    """How much of a stage's blocks is not updated by the host alone: its first ones."""
    table, names = job.table(part), job.block_names(part)
    on_device = sum(table.on_device[name] for name in names)
    return on_device / (len(names) * job.units[Role.BLOCK].shard_length) if names else 0.0


@dataclass(frozen=True)
class _Blocks:
    """Bytes that one block keeps of a micro-batch.

    Attributes:
        whole: everything its backward needs.
        input: its input alone, on the device; ``host_input`` in the machine's memory.
        group: blocks that are recomputed together, 0 where none is.
        most: recomputed blocks of a chunk, ``None`` for all.
    """

    whole: float
    input: float
    host_input: float
    group: int
    most: int | None

    @staticmethod
    def of(job: Job) -> _Blocks:
        recompute, shares = job.config.recompute, job.token_splits
        boundary = float(job.boundary_bytes)
        if recompute.distribute_saved_activations and shares == 1:
            boundary /= job.layout.tensor
        to_host = recompute.checkpoint_in_cpu
        full = recompute.recompute_granularity == "full"
        uniform = recompute.recompute_method == "uniform"
        count = recompute.recompute_num_layers
        return _Blocks(
            whole=job.tokens * block_bytes_per_token(job),
            input=0.0 if to_host else boundary,
            host_input=boundary if to_host else 0.0,
            group=((count or 1) if uniform else 1) if full else 0,
            most=None if uniform else count,
        )

    def groups(self, num_blocks: int) -> list[int]:
        """Sizes of the groups of a chunk's blocks that are recomputed together."""
        if not self.group:
            return []
        recomputed = num_blocks if self.most is None else min(num_blocks, self.most)
        whole, rest = divmod(recomputed, self.group)
        return [self.group] * whole + [rest] * bool(rest)

    def kept(self, num_blocks: int) -> float:
        """Bytes on the device of a chunk and micro-batch."""
        groups = self.groups(num_blocks)
        return (num_blocks - sum(groups)) * self.whole + len(groups) * self.input

    def kept_by_host(self, num_blocks: int) -> float:
        """Bytes in the machine's memory of a chunk and micro-batch."""
        return len(self.groups(num_blocks)) * self.host_input


def block_bytes_per_token(job: Job) -> float:
    """Bytes that a block keeps of a token on a rank, without what selective recomputation forgets."""
    shape, size = job.shape, job.element_size
    # Norms of single heads keep no statistics, but compute them again.
    over_width = shape.qk_layernorm and shape.qk_layernorm_scope == "width"
    head_norms = 2.0 * STATISTICS_BYTES if over_width else 0.0
    log_sums = 4 * shape.num_attention_heads
    statistics = num_norms(shape) * STATISTICS_BYTES / job.token_splits + (head_norms + log_sums) / job.layout.tensor
    forgotten = 0.0
    if job.config.recompute.recompute_granularity == "selective":
        modules = job.config.recompute.recompute_modules
        if "core_attn" in modules:
            forgotten += (
                (normed_width(shape) + gated_width(shape) + distance_width(shape)) * size + head_norms
            ) / job.layout.tensor
        if "mlp" in modules:
            forgotten += shape.ffn_hidden_size * (3 if shape.gated else 2) * size / job.layout.tensor
        if "layernorm" in modules:
            forgotten += num_norms(shape) * shape.hidden_size * size / job.token_splits
    kept = layer_activation_bytes_per_token(
        shape,
        size,
        has_dropout=job.config.model.hidden_dropout > 0,
        tensor_parallel=job.layout.tensor,
        sequence_parallel=job.config.parallel.sequence_parallel,
    )
    return kept + statistics + _mask_bytes_per_token(job) - forgotten


def _mask_bytes_per_token(job: Job) -> float:
    """Of a layer with a window, where no kernel computes it without a mask: a byte for each pair of tokens."""
    shape, config = job.shape, job.config
    masked = config.model.attention_dropout > 0 or config.data.reset_attention_mask
    width = shape.kv_channels + (DISTANCE_CHANNELS if distance_width(shape) else 0)
    if not masked and has_window_kernel(job.device_type, DTYPES[config.precision.dtype], width):
        return 0.0
    windows = any(window_of(shape, layer) for layer in range(shape.num_layers))
    return shape.seq_length**2 / job.tokens if windows else 0.0


def _loss_buffers(job: Job, part: StagePart) -> float:
    """In the output layer's forward: its inputs, and logits with their gradients a piece of the tokens at a time."""
    if not part.last:
        return 0.0
    shape, size, wide = job.shape, job.element_size, job.wide_size
    rows = -(-shape.padded_vocab_size // job.layout.tensor)
    pieces = num_chunks(job.tokens, rows, size, job.device_type)
    logits = -(-job.tokens // pieces) * rows * size
    hidden = job.tokens * shape.hidden_size * size
    gradient = rows * shape.hidden_size
    in_place = job.device_type == "cuda" and size <= 4  # the logits' gradient takes their memory
    work = max((1 if in_place else 2) * logits, logits + gradient * size)
    if pieces > 1:
        work += gradient * wide
    inputs = (2 if job.token_splits == 1 else 2 / job.token_splits + 1) * hidden
    return inputs + hidden + work + _gathered(job, part, loss=True)


def _backward_buffers(job: Job, part: StagePart, blocks: _Blocks) -> float:
    """In a block's backward: gradients on their way through it, its weights' gradients, what is recomputed."""
    shape, size = job.shape, job.element_size
    block = job.units[Role.BLOCK]
    hidden = job.tokens * shape.hidden_size * size
    inner = job.tokens * max(shape.ffn_hidden_size, 3 * shape.hidden_size) * size / job.layout.tensor
    gathered = hidden if job.token_splits > 1 else 0
    most = max((group for count in part.blocks for group in blocks.groups(count)), default=0)
    buffers = 2 * hidden / job.token_splits + gathered + inner + block.length * size + most * blocks.whole
    if job.zero_stage >= 2:
        buffers += (1 + MAX_IN_FLIGHT) * (block.length + block.shard_length) * job.wide_size
    if part.last and job.config.model.tied:  # complete as LM head's before the blocks' are
        buffers += job.units[Role.LM_HEAD].length * size
    return buffers + _gathered(job, part, loss=False)


def _gathered(job: Job, part: StagePart, *, loss: bool) -> float:
    """Weights that ZeRO-3 has brought together, or that came from the host: of a layer and of the one after it."""
    if not job.brings_parameters:
        return 0.0
    length = {role: unit.length * job.element_size for role, unit in job.units.items()}
    if loss:
        return float(length[Role.LM_HEAD] + length[Role.FINAL_NORM])
    own_head = part.last and not job.config.model.tied
    tied = length[Role.EMBEDDING] if part.has(Role.FINAL_NORM) and not own_head else 0
    return float(2 * length[Role.BLOCK] + tied)


def _end_buffers(job: Job, part: StagePart) -> float:
    """At the end of the step: reduced shards that have not been copied yet, sums in a narrower format."""
    whole, shard = _elements(job, part)
    travelling = 2 if job.config.parallel.grad_reduce_in_bf16 else job.wide_size
    arriving = travelling * shard if job.zero_stage == 1 else 0
    narrow = 2 * whole if travelling < job.wide_size and job.layout.data > 1 and job.zero_stage < 2 else 0
    return arriving + narrow


def _boundary_buffers(job: Job, stage: int) -> float:
    """Messages between stages; a recorded step cannot reuse the memory of one that it has received."""
    if job.layout.pipeline == 1:
        return 0.0
    count = float(BOUNDARIES_IN_FLIGHT)
    if job.graph:
        last, chunks = stage == job.layout.pipeline - 1, job.num_virtual_stages
        received = (chunks - (stage == 0)) + (chunks - last)  # by all chunks, of a micro-batch
        still = max(map(sum, alive(stage, job.layout.pipeline, job.num_micro_batches, chunks))) / chunks
        count += max(0.0, job.num_micro_batches - still) * received
    return count * job.boundary_bytes


def _symmetric_memory(job: Job) -> float:
    """The workspace of fused transfers, once the activations are large enough for them; not of torch's allocator."""
    gathered = job.tokens * job.shape.hidden_size * job.element_size
    fused = job.token_splits > 1 and job.config.parallel.tp_comm_overlap and gathered >= FUSED_BYTES
    return 2.0 * gathered if fused else 0.0
