"""Builds the engine of a pipeline of layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from gptpar.adapter.build import build_engine, move_buffers
from gptpar.adapter.guards.agreement import require_same_model
from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.adapter.layer_stages import LayerStages, layers_of, plan_layers, sharing_problems
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.pipeline_module import PipelineModule, seeded
from gptpar.deepspeed.engines.client_optimizer import ClientOptimizer, groups_of
from gptpar.deepspeed.engines.pipeline_engine import PipelineEngine
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.errors import ConfigError, ModelError
from gptpar.model.layer_spec import LayerSpec
from gptpar.system.activity import Activity
from gptpar.topology.agreement import all_or_none
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import DATA, Mesh

Layer: TypeAlias = LayerSpec | nn.Module | Callable[[torch.Tensor], torch.Tensor]
LabelLoss: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""(the last layer's output, labels) -> the loss, a scalar."""


def check_pipeline(pipeline: PipelineModule, loss_fn: LabelLoss | None, world: int) -> None:
    """Check that a pipeline that the user has made can be trained.

    Raises:
        ModelError: it cannot; names every reason.
    """
    mesh, problems = pipeline.topology.mesh, []
    if loss_fn is not None:
        problems.append("loss_fn is passed beside a PipelineModule: pass it to the PipelineModule")
    if mesh.tensor > 1:
        problems.append(
            f"the PipelineModule's tensor axis has {mesh.tensor} processes: gptpar.initialize trains layers that are "
            "whole on each process (tensor=1)"
        )
    if mesh.world_size != world:
        problems.append(
            f"the PipelineModule was made for {mesh.world_size} process(es), and there are {world}: call "
            "torch.distributed.init_process_group before it is made, or pass the list of layers as the model"
        )
    if problems:
        raise ModelError(problems)


def make_pipeline(
    layers: Sequence[Layer], loss_fn: LabelLoss | None, options: EngineOptions, rank: int, device: torch.device
) -> PipelineModule:
    """Divide a list of layers as the configuration says; each process builds its own, in host memory.

    Raises:
        ConfigError: they cannot be divided like that.
    """
    chosen = options.pipeline
    world = dist.get_world_size() if dist.is_initialized() else 1
    every = chosen.recompute
    return PipelineModule(
        layers,
        topology=make_topology(Mesh(data=world // chosen.stages, pipeline=chosen.stages), rank, device),
        loss_fn=loss_fn,
        partition_method=chosen.partition,
        num_virtual_stages=chosen.virtual_stages,
        build=lambda spec: seeded(spec, options.seed),
        recompute=lambda names: [tuple(names[at : at + every]) for at in range(0, len(names), every)] if every else (),
    )


def engine_of_pipeline(
    pipeline: PipelineModule,
    optimizer: ClientOptimizer,
    model_parameters: Iterable[Any] | None,
    options: EngineOptions,
    former: TrainingEngine | None = None,
) -> PipelineEngine:
    """The engine of a pipeline's layers, which keep their values; of a tied layer, the first stage's values count.

    Args:
        former: has the layers now, and is closed once everything is checked.

    Raises:
        ConfigError: optimizer or parameters are wrong; it names everything.
        ModelError: the layers cannot be trained; it names every reason.
        GptparError: memory does not suffice, or another process had one of these errors.
    """
    topology, layers = pipeline.topology, layers_of(pipeline)
    with all_or_none(topology.mesh.world_size):
        if not options.managed:
            raise ConfigError(
                ['"managed_gradient_accumulation": false is not supported with pipeline parallelism: leave it out.']
            )
        if problems := list(sharing_problems(pipeline.specs)):
            raise ModelError(problems)
        may_be_empty = topology.mesh.pipeline > 1
        groups, options = groups_of(optimizer, model_parameters, pipeline, options, may_be_empty=may_be_empty)
        trained = {parameter for group in groups for parameter in group["params"]}
        plan = plan_layers(layers, dtype=options.dtype, buffers=options.buffer_dtype, trained=trained)
    with all_or_none(topology.mesh.world_size):  # of the processes of a stage all fail, or none
        if topology.group(DATA) is not None:
            require_same_model(pipeline, groups, topology.group(DATA))
    close_former(former)
    stages = LayerStages(pipeline, plan)
    if options.dtype is not None:
        pipeline.expect_dtype(options.dtype)
    for layer, group in pipeline.tied_groups.items():
        _follow_first(layers[layer], group, topology.device)
    move_buffers(pipeline, topology.device, None, options.buffer_dtype)
    parts = build_engine(stages, groups, options, topology, Activity.of_worker(), OrderWatch(topology))
    return PipelineEngine(pipeline, stages, parts, groups, options)


@torch.no_grad()
def close_former(engine: TrainingEngine | None) -> None:
    """Close the engine that has had the model so far, with a warning."""
    if engine is not None:
        warnings.warn(
            "this model has an engine already, and two cannot train it: the former one is closed, and the new one goes "
            "on with its weights, without its moments.",
            stacklevel=5,
        )
        engine.close()


def _follow_first(layer: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all stages' copies of a layer the first stage's values."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        value = tensor.data.to(device).contiguous()
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
        tensor.data.copy_(value)
