"""The dimensions of the space: sizes of the axes, ZeRO stage, virtual stages, recomputation, offload."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptpar.plan.space.candidate import UNCHANGED, Changes, Dimension, Option
from gptpar.topology.mesh import COPIES, Mesh

# Fields of a configuration in which candidates differ, as section.field.
TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
EXPERT = "parallel.expert_model_parallel_size"
CONTEXT, CONTEXT_WAY = "parallel.context_parallel_size", "parallel.cp_comm_type"
WAYS = ("a2a", "allgather")
"""Values of ``--cp-comm-type`` but ``auto``."""
VIRTUAL_STAGES = "parallel.num_virtual_stages_per_pipeline_rank"
LAYERS_PER_VIRTUAL_STAGE = "parallel.num_layers_per_virtual_pipeline_stage"
PARTITION = "parallel.pipeline_partition_method"
ZERO_STAGE = "parallel.zero_stage"
SEQUENCE_PARALLEL = "parallel.sequence_parallel"
MICRO_BATCH, GLOBAL_BATCH = "batch.micro_batch_size", "batch.global_batch_size"
RECOMPUTE, RECOMPUTE_MODULES = "recompute.recompute_granularity", "recompute.recompute_modules"
OFFLOADED_LAYERS = "recompute.cpu_offloading_num_layers"
CPU_OPTIMIZER, CPU_RATIO = "offload.cpu_optimizer", "offload.cpu_optimizer_ratio"
CPU_PARAMETERS, OFFLOAD_GRADIENTS = "offload.cpu_parameters", "offload.offload_gradients"
SUMMED_SHARE, FUSED_SUMS = "offload.offload_gradients_ratio", "precision.gradient_accumulation_fusion"

ON_CPU: Changes = {CPU_OPTIMIZER: True, CPU_RATIO: "auto"}
HALF_OF_THE_SUMS: Changes = {OFFLOAD_GRADIENTS: "on", SUMMED_SHARE: 0.5}
PARAMETERS_ON_CPU: Changes = {CPU_PARAMETERS: True}
RECOMPUTED: Changes = {RECOMPUTE: "full", RECOMPUTE_MODULES: None}
PRECISIONS = ("precision.bf16", "precision.fp16", "precision.fp64")


def layouts(
    num_processes: int,
    tensor_sizes: Iterable[int] | None = None,
    stages: Callable[[int], Iterable[int]] | None = None,
    contexts: Callable[[int], Iterable[int]] = lambda rest: (1,),
) -> Iterator[Mesh]:
    """Every (data, tensor, pipeline, context) whose product is the number of processes, by tensor, then pipeline size.

    Args:
        tensor_sizes: sizes of the tensor axis, instead of all divisors of the number of processes.
        stages: number of processes that a tensor size leaves -> sizes of the pipeline axis, instead of all divisors.
        contexts: number of processes that tensor and pipeline leave -> sizes of the context axis.
    """
    for tensor in divisors(num_processes) if tensor_sizes is None else tensor_sizes:
        rest = num_processes // max(1, tensor)
        for pipeline in (divisors if stages is None else stages)(rest):
            for context in contexts(rest // max(1, pipeline)):
                yield sized(num_processes, tensor, pipeline, context)


def sized(num_processes: int, tensor: int, pipeline: int, context: int = 1) -> Mesh:
    """The layout with these sizes, whose data axis has the remaining processes."""
    data = max(1, num_processes // max(1, tensor * pipeline * context))
    return Mesh(data, tensor, pipeline, context=context)


def with_expert_axes(meshes: Iterable[Mesh], num_experts: int) -> Iterator[Mesh]:
    """Each layout with every size of the expert axis that it can have."""
    for mesh in meshes:
        fit = (size for size in divisors(mesh.data * mesh.context) if num_experts % size == 0)
        yield from (replace(mesh, expert=size) for size in fit)


def divisors(number: int, most: int | None = None) -> list[int]:
    """All divisors of a number, up to ``most``."""
    return [i for i in range(1, min(number, most or number) + 1) if number % i == 0]


def sizes(mesh: Mesh) -> list[Option]:
    """The one option that sets the layout's sizes."""
    changes: dict[str, Any] = {TENSOR: mesh.tensor, PIPELINE: mesh.pipeline, CONTEXT: mesh.context}
    changes |= {EXPERT: mesh.expert} if mesh.expert > 1 else {}
    return [Option(changes, mesh.describe())]


def zero_stages(mesh: Mesh) -> range:
    """ZeRO stages that differ in a layout; where no weights have copies all are the same, and only 0 is tried."""
    return range(4) if mesh.size(*COPIES) > 1 else range(1)


def virtual_stages(mesh: Mesh, counts: Sequence[int], most: int | None = None) -> list[int]:
    """The numbers of virtual stages that each pipeline rank can have; more than one needs a pipeline.

    Args:
        most: limit of the virtual stages of all ranks together.
    """
    if mesh.pipeline == 1:
        return [1]
    return [count for count in counts if count == 1 or most is None or count * mesh.pipeline <= most]


def fixed(*options: Option) -> Dimension:
    """A dimension with the same options in each layout."""
    return lambda mesh: options


@dataclass(frozen=True)
class Choices:
    """A dimension that is one field of the configuration.

    Attributes:
        field: the field's name, as ``section.field``.
        values: layout -> the values that it can have; ``None`` leaves the field as it is.
        label: how a value is written in a candidate's name, with ``{}`` for the value; empty: not at all.
    """

    field: str
    values: Callable[[Mesh], Iterable[Any]]
    label: str = ""

    def __call__(self, mesh: Mesh) -> list[Option]:
        """The options of a layout."""
        return [
            UNCHANGED if value is None else Option({self.field: value}, self.label.format(value))
            for value in self.values(mesh)
        ]


def listed(field: str, chosen: Sequence[Any] | None, unset: Any = None) -> Choices:
    """A dimension with the values that a user lists for a field, the same in each layout.

    Args:
        field: the field's name, as ``section.field``.
        chosen: the values; ``None``: the field stays as it is.
        unset: the value that leaves the field as it is.
    """
    values = [None if value == unset else value for value in dict.fromkeys(chosen or [None])]
    return Choices(field, lambda mesh: values)


def layout_sizes(text: str) -> dict[str, int]:
    """An argparse type: ``dp2tp2``, ``tp2pp2``, ``dp4ep2``, ``cp2``; returns the size of each axis that is named."""
    if not re.fullmatch(r"((dp|tp|pp|cp|ep)[1-9]\d*x?)+", text):
        raise argparse.ArgumentTypeError(f"{text} is not a layout such as dp4, tp2pp2 or dp2xtp2")
    found = re.findall(r"(dp|tp|pp|cp|ep)(\d+)", text)
    if twice := [axis for axis, count in Counter(axis for axis, _ in found).items() if count > 1]:
        raise argparse.ArgumentTypeError(f"{text} names {twice[0]} more than once")
    return {axis: int(size) for axis, size in found}


def cpu_ratio(text: str) -> float | str:
    """An argparse type: a ratio from 0 to 1, or ``auto``."""
    if text != "auto" and not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return text if text == "auto" else float(text)
