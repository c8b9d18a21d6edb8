"""Flags of tensor, pipeline and data parallelism and of ZeRO, and whether processes can be laid out so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from gptpar.config.fields import Notes, Open, flag, on_unless
from gptpar.config.roles import layer_roles
from gptpar.config.sections.context import check_context, derive_context
from gptpar.topology.mesh import Mesh

if TYPE_CHECKING:
    from gptpar.config import Flags

LAYERS_BESIDE_BLOCKS = len(layer_roles(0))
HIGHEST_ZERO_STAGE = 3
SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron's names of the ZeRO stages."""
MAX_GATHERED_BYTES = 256 * 2**20
"""The most bytes of keys and values that attention gathers at once over the context axis; at least one group."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Generic[Open]):
    """How the processes share the work."""

    tensor_model_parallel_size: int = flag(
        1, "processes that split each layer", least=1, most=1_000_000, names=("--model-parallel-size",)
    )
    sequence_parallel: bool = flag(False, "split the tokens between layers over the tensor-parallel processes, too")
    tp_comm_overlap: bool = on_unless(
        "--no-tp-comm-overlap",
        "do not overlap tensor-parallel communication with matrix products through symmetric memory",
    )
    context_parallel_size: int = flag(
        1,
        "processes that divide the tokens of each sample",
        least=1,
        most=1_000_000,
        names=("--ds-sequence-parallel-size",),
    )
    cp_comm_type: str = flag(
        "auto",
        "how context-parallel processes see each other's tokens: a2a exchanges them for heads, allgather gathers keys "
        "and values; auto takes the faster kernel, or sends less",
        choices=("auto", "a2a", "allgather"),
        spellings={"p2p": "auto", "a2a+p2p": "auto", "all_gather": "allgather"},
    )
    pipeline_model_parallel_size: int = flag(
        1, "processes that split the stack of layers", least=1, most=1_000_000, names=("--pipe-parallel-size",)
    )
    pipeline_partition_method: str = flag(
        "parameters",
        "where the stack is cut: parameters, flops, uniform, type:REGEX of a layer's class, or boundaries like 0,7,14",
        names=("--partition-method", "--pp-partition-method"),
    )
    expert_model_parallel_size: int = flag(
        1,
        "processes with other tokens (data x context) that have different experts",
        least=1,
        most=1_000_000,
        names=("--moe-expert-parallel-size",),
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients over data-parallel processes in bf16 instead of fp32")
    distributed_backend: str | None = flag(None, "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = flag(
        10, "a collective that takes longer ends the run", above=0, most=1_000_000
    )
    num_virtual_stages_per_pipeline_rank: int | Open = flag(
        None, "interleaved pipeline: virtual stages of each process (default: 1)", least=1, most=10_000, complete=1
    )
    zero_stage: int | Open = flag(
        None,
        "what is sharded over the data-parallel processes: 1 optimizer state, 2 also gradients, 3 also parameters "
        "(default: 3 with --no-pipeline-parallel, 1 with --use-distributed-optimizer, else 0)",
        least=0,
        complete=0,
    )

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of each process; more than one is an interleaved pipeline.

        As typed, it is the number before --num-layers-per-virtual-pipeline-stage counts.
        """
        stages: int | None = self.num_virtual_stages_per_pipeline_rank
        return stages or 1

    @property
    def model_parallel_size(self) -> int:
        """Processes that together hold the model once."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def heads_sent(self, num_heads: int, num_groups: int) -> dict[str, float]:
        """``--cp-comm-type`` -> heads that one attention layer sends for each token of a sample, forward and backward.

        By a2a queries, keys, values and outputs, and their gradients; a group is sent to each rank that has some of its
        queries. By allgather keys and values twice, to everyone, and their gradients.

        Args:
            num_heads, num_groups: numbers of query heads and of key/value heads.
        """
        size, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        heads, groups = num_heads // tensor, num_groups // tensor
        return {"a2a": 4 * (heads + math.lcm(groups, size)) / size, "allgather": 6.0 * groups}

    def num_copies(self, world_size: int) -> int:
        """Number of copies of the model on ``world_size`` processes; at least 1, also if they are too few."""
        return max(1, world_size // max(1, self.model_parallel_size))

    def data_parallel_size(self, world_size: int) -> int:
        """The size of the data axis: how many samples are read at once; at least 1, also if processes are too few."""
        return max(1, self.num_copies(world_size) // max(1, self.context_parallel_size))

    def mesh(self, world_size: int) -> Mesh:
        """The mesh of ``world_size`` processes."""
        sizes = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        axes = {"context": self.context_parallel_size, "expert": self.expert_model_parallel_size}
        return Mesh(self.data_parallel_size(world_size), *sizes, **axes)


def groups_gathered(num_groups: int, bytes_of_group: int) -> int:
    """Key/value heads that attention gathers at once over the context axis.

    Args:
        bytes_of_group: keys and values of one head, of all tokens of a micro-batch.
    """
    times = -(-num_groups * bytes_of_group // MAX_GATHERED_BYTES)
    return -(-num_groups // max(1, min(num_groups, times)))


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(ParallelConfig[None]):
    """How many processes share the work, and how."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "interleaved pipeline: blocks in each virtual stage",
        least=1,
        most=10_000,
        before="num_virtual_stages_per_pipeline_rank",
    )
    no_pipeline_parallel: bool = flag(False, "never split the stack of layers", before="zero_stage")
    use_distributed_optimizer: bool = flag(False, "same as --zero-stage 1")
    use_megatron_fsdp: bool = flag(
        False, "the ZeRO stage of --data-parallel-sharding-strategy", names=("--use-torch-fsdp2", "--use-custom-fsdp")
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "with --use-megatron-fsdp: ZeRO stage 0, 1, 2 or 3 in Megatron's words (default: optim_grads_params)",
        choices=SHARDED,
    )
    nproc_per_node: int | None = flag(
        None,
        "workers to start on this machine without torchrun (default: one a visible GPU, else one)",
        least=1,
        most=1_000,
    )


def check_parallel(flags: Flags, world_size: int) -> Iterator[str]:
    """Whether the processes can be laid out as asked, and the model be cut that way."""
    p = flags.parallel
    tensor, pipeline = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    if tensor < 1 or pipeline < 1:
        return  # reported as out of range
    context = p.context_parallel_size
    unit = p.model_parallel_size * max(1, context)
    if world_size % unit:
        sizes, axes = f"{tensor} x {pipeline}", "tensor x pipeline"
        if context > 1:
            sizes, axes = f"{sizes} x {context}", f"{axes} x context"
        yield (
            f"{world_size} processes cannot be cut into groups of {sizes} = {unit} ({axes}): start a multiple of "
            f"{unit}, or lower one of the sizes."
        )
    if p.data_parallel_sharding_strategy is not None and not p.use_megatron_fsdp:
        yield "--data-parallel-sharding-strategy is for --use-megatron-fsdp: give that flag, too, or --zero-stage N."
    yield from _experts(flags, p.num_copies(world_size))
    yield from _tensor(flags)
    if context > 1:
        yield from check_context(flags)
    yield from _pipeline(flags)
    yield from _zero(flags)


def _experts(flags: Flags, num_copies: int) -> Iterator[str]:
    """The expert axis is folded over context and data, and its ranks have equally many experts."""
    size, num_experts = flags.parallel.expert_model_parallel_size, flags.model.num_experts
    copies = f"the {num_copies} process(es) that have other tokens (data x context)"
    for said, number in ((copies, num_copies), (f"--num-experts {num_experts}", num_experts)):
        if size > 1 and number % size:
            sizes = ", ".join(str(i) for i in range(1, min(number, 64) + 1) if number % i == 0)
            yield f"--expert-model-parallel-size {size} does not divide {said}: sizes that do: {sizes}."


def _tensor(flags: Flags) -> Iterator[str]:
    """Check that splits over the tensor axis are equal; the vocabulary alone may be split unevenly."""
    m, p = flags.model, flags.parallel
    size = p.tensor_model_parallel_size
    split = {
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": m.num_query_groups if m.num_query_groups != m.num_attention_heads else None,
        "--ffn-hidden-size": m.ffn_hidden_size,
    }
    for name, length in split.items():
        if length and length > 0 and length % size:
            sizes = ", ".join(str(i) for i in range(1, min(length, 64) + 1) if length % i == 0)
            yield f"{name} {length} is not divisible by --tensor-model-parallel-size {size}; sizes that fit: {sizes}."
    if p.sequence_parallel:
        yield from _sequence(flags, size)


def _sequence(flags: Flags, size: int) -> Iterator[str]:
    """The tokens of a micro-batch must have equal shares."""
    micro, length = flags.batch.micro_batch_size, flags.model.seq_length
    if length and (context := flags.parallel.context_parallel_size) > 1:
        length //= context
    if micro and length and micro * length % size:
        yield (
            f"--sequence-parallel: the {micro} x {length} = {micro * length} tokens of a micro-batch are not divisible "
            f"by --tensor-model-parallel-size {size}: make --micro-batch-size or --seq-length a multiple of it."
        )


def _pipeline(flags: Flags) -> Iterator[str]:
    p, num_layers = flags.parallel, flags.model.num_layers
    stages, chunks = p.pipeline_model_parallel_size, p.num_virtual_stages
    if p.no_pipeline_parallel and stages > 1:
        yield "--no-pipeline-parallel contradicts --pipeline-model-parallel-size > 1: drop one of them."
    if stages == 1 and (chunks > 1 or p.num_layers_per_virtual_pipeline_stage):
        yield (
            "virtual stages interleave the work of a pipeline, but --pipeline-model-parallel-size is 1: raise it to at "
            "least 2, or drop the flags for virtual stages."
        )
    elif num_layers and num_layers > 0:
        yield from _virtual_stages(flags, num_layers)
    num_parts = stages * chunks
    num_specs = num_layers + LAYERS_BESIDE_BLOCKS if num_layers and num_layers > 0 else None
    if num_specs and num_parts > num_specs:
        yield (
            f"--pipeline-model-parallel-size {stages} x {chunks} virtual stage(s) = {num_parts} parts, but there are "
            f"only {num_layers} + {LAYERS_BESIDE_BLOCKS} = {num_specs} layers (embedding, positions, blocks, final "
            f"norm, output): use at most {num_specs} parts."
        )
    yield from _partition_method(p.pipeline_partition_method, num_parts, num_specs)


def _virtual_stages(flags: Flags, num_layers: int) -> Iterator[str]:
    """--num-layers-per-virtual-pipeline-stage must give a whole number of chunks, and the one that is asked for."""
    p = flags.parallel
    stages, per_chunk, chunks = (
        p.pipeline_model_parallel_size,
        p.num_layers_per_virtual_pipeline_stage,
        p.num_virtual_stages,
    )
    if not per_chunk or per_chunk < 0:
        return
    unit = stages * per_chunk
    if num_layers % unit:
        yield (
            f"--num-layers {num_layers} is not divisible by --pipeline-model-parallel-size {stages} x "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} = {unit}: choose other numbers, or give "
            "--num-virtual-stages-per-pipeline-rank, which takes any number of layers."
        )
    elif num_layers // unit != chunks:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} makes {num_layers // unit} virtual stage(s) a "
            f"process, --num-virtual-stages-per-pipeline-rank says {chunks}: keep one."
        )


def _partition_method(method: str, num_parts: int, num_specs: int | None) -> Iterator[str]:
    name = f"--partition-method {method}"
    if method in ("parameters", "flops", "uniform"):
        return
    if method.startswith("type:"):
        try:
            re.compile(method.removeprefix("type:"))
        except re.error as error:
            yield f"{name}: not a regular expression ({error}): match layer classes, for example type:block."
        return
    if not re.fullmatch(r"\d+(,\d+)+", method):
        yield f"{name}: unknown; it takes parameters, flops, uniform, type:REGEX, or boundaries such as 0,7,14."
        return
    bounds = [int(word) for word in method.split(",")]
    if bounds[0] != 0 or any(b <= a for a, b in zip(bounds, bounds[1:], strict=False)):
        yield f"{name}: boundaries start with 0 and grow, for example 0,7,14."
    elif len(bounds) != num_parts + 1:
        yield (
            f"{name}: these are {len(bounds) - 1} part(s), but stages x virtual stages is {num_parts}: give "
            f"{num_parts + 1} boundaries."
        )
    elif num_specs and bounds[-1] != num_specs:
        yield (
            f"{name}: the last boundary is {bounds[-1]}, but there are {num_specs} layers ({LAYERS_BESIDE_BLOCKS} "
            f"beside the blocks: embedding, positions, final norm, output): end with {num_specs}."
        )


def _zero(flags: Flags) -> Iterator[str]:
    p = flags.parallel
    if p.zero_stage is not None and p.zero_stage > HIGHEST_ZERO_STAGE:
        yield f"--zero-stage is {p.zero_stage}; it must be at most {HIGHEST_ZERO_STAGE}."
    if p.use_distributed_optimizer and p.zero_stage == 0:
        yield "--zero-stage 0 contradicts --use-distributed-optimizer, which is stage 1: drop one of them."


def derive_parallel(notes: Notes, world_size: int) -> None:
    p = notes.flags.parallel
    data_parallel = p.data_parallel_size(world_size)
    tensor, pipeline = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    if p.sequence_parallel and tensor == 1:  # as in Megatron, which warns
        notes.replace("parallel", "sequence_parallel", False, "--tensor-model-parallel-size is 1: nothing to split")
    if notes.flags.precision.deterministic_mode and tensor > 1 and p.tp_comm_overlap:
        reason = "--deterministic-mode: products fused with transfers are not proved to add in one order"
        notes.replace("parallel", "tp_comm_overlap", False, reason)
    context = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    if p.model_parallel_size > 1 or context:
        reason = f"{world_size} processes / ({tensor} tensor x {pipeline} pipeline{context})"
        notes.add("data parallel size", data_parallel, reason)
    if p.context_parallel_size > 1:
        derive_context(notes)
    num_layers, per_chunk = notes.flags.model.num_layers, p.num_layers_per_virtual_pipeline_stage
    if num_layers and per_chunk and pipeline > 0 and num_layers % (pipeline * per_chunk) == 0:
        reason = f"{num_layers} layers / ({pipeline} stages x {per_chunk} layers in a virtual stage)"
        notes.fill("parallel", "num_virtual_stages_per_pipeline_rank", num_layers // (pipeline * per_chunk), reason)
    _derive_zero_stage(notes, p.num_copies(world_size))


def _derive_zero_stage(notes: Notes, num_copies: int) -> None:
    p = notes.flags.parallel
    strategy = p.data_parallel_sharding_strategy or SHARDED[-1]
    if p.use_megatron_fsdp and strategy in SHARDED:
        notes.fill("parallel", "zero_stage", SHARDED.index(strategy), f"--use-megatron-fsdp, {strategy}")
    elif p.no_pipeline_parallel and num_copies > 1:
        reason = f"--no-pipeline-parallel with {num_copies} copies of the weights"
        notes.fill("parallel", "zero_stage", 3, reason)
    elif p.use_distributed_optimizer:
        notes.fill("parallel", "zero_stage", 1, "--use-distributed-optimizer")
    else:
        notes.fill("parallel", "zero_stage", 0, "every process holds all of its part of the model and the optimizer")
