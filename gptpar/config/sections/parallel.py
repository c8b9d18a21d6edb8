"""Flags of tensor, pipeline and data parallelism, and of ZeRO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic

from gptpar.config.fields import Open, flag, on_unless
from gptpar.topology.mesh import Mesh

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
            num_heads, num_groups: of query heads, and of key/value heads.
        """
        size, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        heads, groups = num_heads // tensor, num_groups // tensor
        return {"a2a": 4 * (heads + math.lcm(groups, size)) / size, "allgather": 6.0 * groups}

    def num_copies(self, world_size: int) -> int:
        """How often ``world_size`` processes hold the model; at least 1, also if they are too few."""
        return max(1, world_size // max(1, self.model_parallel_size))

    def data_parallel_size(self, world_size: int) -> int:
        """The size of the data axis: how many samples are read at once; at least 1, also if processes are too few."""
        return max(1, self.num_copies(world_size) // max(1, self.context_parallel_size))

    def mesh(self, world_size: int) -> Mesh:
        """How many of ``world_size`` processes are on each axis."""
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
        False,
        "the ZeRO stage of --data-parallel-sharding-strategy",
        names=("--use-torch-fsdp2", "--use-custom-fsdp"),
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
