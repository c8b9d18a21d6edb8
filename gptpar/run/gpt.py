"""Builds the engine of a GPT run: pipeline, parameter table, memory, CPU optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gptpar.config import Config
from gptpar.config.roles import Role
from gptpar.config.sections.precision import wants_graph
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.engine import Engine, EngineSettings, table_of
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.errors import ConfigError
from gptpar.model.dtypes import DTYPES
from gptpar.model.experts.balance import ExpertBalance
from gptpar.model.experts.dispatch import ExpertAxis, RowLimit
from gptpar.model.experts.products import has_grouped_kernel
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import build_on_meta
from gptpar.model.spec import ModelSpec
from gptpar.offload.build import make_host_optimizer
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.tied_embedding import PartialGradient, tied_unit
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.parameter_groups import ParameterGroups
from gptpar.pipeline.host_activations import HostActivations, offloaded_blocks
from gptpar.pipeline.layer_split import LayerSplit, split_model
from gptpar.pipeline.recompute import Keep, recompute_groups
from gptpar.pipeline.runtime import Pipeline
from gptpar.pipeline.stage import Fields, Stage
from gptpar.plan.job import Job
from gptpar.plan.memory import activations_on_host, copied_size
from gptpar.tensor_parallel import TensorAxis, symmetric_memory_works
from gptpar.tensor_parallel.layers import SplitLinear
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import COPIES, EXPERT, TENSOR, Mesh, copies_over


@dataclass(frozen=True)
class GptEngine:
    """The engine, and what a GPT adds to it.

    Attributes:
        model: its description.
        pipeline: the model, cut into stages.
        host: the CPU optimizer; ``None`` where it has nothing to do.
        groups: the parameters' groups.
        experts: balances the model's experts.
        limit: of rows of experts in recorded steps; ``None``: there is none.
        partial_gradient: submits the tied embedding's gradient in part before it is final, where that is possible.
    """

    model: ModelSpec
    pipeline: Pipeline
    engine: Engine
    host: HostOptimizer | None
    groups: ParameterGroups
    experts: ExpertBalance
    limit: RowLimit | None
    partial_gradient: PartialGradient | None


def make_engine(config: Config, topology: Topology, *, tries_memory: bool = False) -> GptEngine:
    """Apply the parallelisms: tensor (inside the layers), recompute, pipeline, then ZeRO over the data axis.

    The partial gradient comes last: it registers with the embedding, and submits at the engine's graph breaks.

    Args:
        config: resolved, with the padded vocabulary filled.
        topology: this process's place.
        tries_memory: the CPU optimizer has no state: gradients that it would get are dropped, no step can be taken.
    """
    settings, device = engine_settings(config, topology), topology.device
    tensor, data = tensor_axis(config, topology), DataAxes.of(topology, config.parallel.zero_stage)
    again = config.recompute
    modules, tiles = frozenset(again.recompute_modules), again.mlp_chunks_for_training
    experts = ExpertAxis.of(topology, limited=settings.records_steps)
    model = gpt_model(config.model, tensor, recompute_modules=modules, mlp_tiles=tiles, experts=experts)
    pipeline = make_pipeline(config, topology, tensor, settings.dtype, model)
    groups = ParameterGroups(config.optimizer, config.model, model)
    if data.zero_stage and any(isinstance(update, MatrixUpdate) for update in groups.updates):
        for split in ((), (EXPERT,)):  # the tensor axis divides matrices, too
            topology.join(*copies_over(split), TENSOR)
    table = table_of(pipeline, data.place, config.offload.least_ratio, groups.group_of)
    tied = tied_unit(config, topology.mesh, table, model.shared)
    on_host = config.offload.cpu_parameters
    parameters = ParameterMemory(table.units, data, settings.dtype, device, on_host=on_host)
    host = None
    if not tries_memory:
        offloaded = {unit: shard[table.on_device[unit] :] for unit, shard in parameters.shards.items()}
        dtypes = settings.dtype, settings.wide
        partitions, leave = table.offloaded(), again.checkpoint_in_cpu or again.cpu_offloading_num_layers
        host = make_host_optimizer(
            config.offload,
            groups.updates,
            partitions,
            offloaded,
            device,
            *dtypes,
            tied,
            clip_grad=config.optimizer.clip_grad,
            itemsize=copied_size(Job(config, topology.mesh)),
            summed_on_host=table.summed_on_host(settings.host_sums) if settings.host_sums else None,
            activation_bytes=int(activations_on_host(Job(config, topology.mesh), topology.stage)) if leave else 0,
        )
    engine = Engine(
        pipeline.stages_here,
        table,
        parameters,
        data,
        settings,
        groups.updates,
        config.optimizer.clip_grad,
        device,
        host,
        tied=pipeline.by_unit(pipeline.tied_groups),
        families=groups.families,
        linears=_linears(pipeline.stages_here),
    )
    partial_gradient = PartialGradient.of(tied, host, engine, pipeline.stages_here)
    balance = ExpertBalance(config.model, model.specs, settings.wide, device)
    for stage in pipeline.stages_here:
        balance.attach(stage.layers_by_name())
    return GptEngine(model, pipeline, engine, host, groups, balance, experts.limit, partial_gradient)


def _linears(stages: Iterable[Stage]) -> dict[str, SplitLinear]:
    """Global name of the weight -> the linear layer, for all of them that are in blocks."""
    layers = [(name, layer) for stage in stages for name, layer in stage.layers_by_name().items()]
    modules = [(path, module) for name, layer in layers for path, module in layer.named_modules(prefix=name)]
    return {f"{path}.weight": module for path, module in modules if isinstance(module, SplitLinear)}


def engine_settings(config: Config, topology: Topology) -> EngineSettings:
    """The engine's number formats, sums and recording for a run.

    Raises:
        ConfigError: a graph is asked for, and experts on this GPU are multiplied by counts that the host reads.
    """
    graph = topology.device.type == "cuda" and wants_graph(config, topology.mesh.size(*COPIES))
    if graph and config.model.has_experts and not has_grouped_kernel(topology.device):
        raise ConfigError(
            [
                "--cuda-graph on: this GPU has no kernel that multiplies the tokens of all experts at once, so that "
                "the host waits for their loads: leave the flag out."
            ]
        )
    dtype = DTYPES[config.precision.dtype]
    wide = torch.promote_types(dtype, torch.float32)
    adds = config.batch.adds_gradients(topology.mesh.world_size)
    return EngineSettings(
        dtype,
        torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else wide,
        adds,
        graph,
        config.logging.log_num_zeros_in_grad,
        host_sums=config.offload.summed_ratio if adds else 0.0,
        fuses_sums=config.precision.gradient_accumulation_fusion,
    )


def tensor_axis(config: Config, topology: Topology) -> TensorAxis:
    """Place this process on the tensor axis."""
    group, parallel = topology.group(TENSOR), config.parallel
    fused = parallel.tp_comm_overlap and group is not None and symmetric_memory_works(group)
    return TensorAxis(topology.mesh.tensor, topology.position(TENSOR), group, parallel.sequence_parallel, fused)


def make_pipeline(
    config: Config, topology: Topology, tensor: TensorAxis, dtype: torch.dtype, model: ModelSpec
) -> Pipeline:
    """The GPT cut into stages, its layers without storage."""
    recompute = config.recompute
    leaving = offloaded_blocks(model.names(Role.BLOCK), recompute.cpu_offloading_num_layers)
    host = HostActivations() if recompute.checkpoint_in_cpu or leaving else None
    width = config.model.hidden_size

    def boundary(sender: int, x: torch.Tensor, fields: Fields) -> tuple[torch.Size, torch.dtype]:
        return torch.Size([x.numel() // (tensor.size if tensor.splits_tokens else 1), width]), dtype

    partition = None
    if recompute.distribute_saved_activations and tensor.group is not None:
        partition = (tensor.group, tensor.rank, tensor.size)
    return Pipeline(
        model.specs,
        topology=topology,
        num_virtual_stages=config.parallel.num_virtual_stages,
        split=split_of(config, topology.mesh),
        build=build_on_meta,
        recompute=partial(recomputed_blocks, config, frozenset(model.names(Role.BLOCK))),
        keep=Keep(partition, host, random=False),  # masks are functions of their seeds
        on_host=leaving,
        token_splits=tensor.size if tensor.splits_tokens else 1,
        boundary=boundary,
    )


def recomputed_blocks(config: Config, blocks: Collection[str], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of blocks that are recomputed together, of the layers (by name) of one piece of the pipeline."""
    return recompute_groups(config.recompute, [name for name in names if name in blocks])


def split_of(config: Config, mesh: Mesh) -> LayerSplit:
    """Which layers go to which stage."""
    parallel = config.parallel
    return split_model(
        gpt_model(config.model), mesh.pipeline, parallel.num_virtual_stages, parallel.pipeline_partition_method
    )
