"""``gptpar.initialize``: any module on the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from gptpar.adapter.build import build_engine, move_buffers
from gptpar.adapter.deferred import Recording
from gptpar.adapter.guards.agreement import require_same_model
from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.adapter.module_stage import ROOT, ModuleStage
from gptpar.adapter.options import EngineOptions, ModelKind, read_options
from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.adapter.units import find_units
from gptpar.adapter.weights import are_held
from gptpar.deepspeed.engines.argument_types import require_types
from gptpar.deepspeed.engines.arguments import before_meeting, chosen_config, take_arguments
from gptpar.deepspeed.engines.batches import LossFunction
from gptpar.deepspeed.engines.client_optimizer import ClientOptimizer, groups_of
from gptpar.deepspeed.engines.dataset import make_loader
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.deepspeed.engines.graph import check_graph
from gptpar.deepspeed.engines.initialize_layers import (
    Layer,
    check_pipeline,
    close_former,
    engine_of_pipeline,
    make_pipeline,
)
from gptpar.deepspeed.engines.pipeline_engine import PipelineEngine
from gptpar.deepspeed.engines.schedulers import ClientScheduler, scheduler_of
from gptpar.deepspeed.engines.training_engine import TIMEOUT_MINUTES, TrainingEngine
from gptpar.errors import GptparError, ModelError
from gptpar.system.activity import Activity
from gptpar.topology.agreement import all_or_none
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import DATA, Mesh
from gptpar.topology.world import join_world, require_same_start

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None
Initialized = tuple[
    ModuleEngine | PipelineEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, LRScheduler | None
]


def initialize(
    args: object = None,
    model: nn.Module | Sequence[Layer] | None = None,
    optimizer: ClientOptimizer = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: ClientScheduler = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource = None,
    mesh_param: Sequence[int] | None = None,
    config_params: ConfigSource = None,
    recording: Recording | None = None,
    loss_fn: LossFunction | None = None,
    former: ModuleEngine | PipelineEngine | None = None,
) -> Initialized:
    """Make an engine that trains a module with ZeRO, offload and other options of a DeepSpeed configuration.

    The engine adds hooks to the module, moves its buffers and gives its parameters (the same objects) other memory;
    ``close()`` removes the hooks. Every process calls this with the same model; the first process's values count. If
    necessary, ``torch.distributed`` is initialised. If one process raises an error, all do, with its rank.

    Args:
        args: a command line whose ``deepspeed_config`` may name the configuration; its ``local_rank`` is set.
        model: the module; a :class:`gptpar.PipelineModule`; or its layers, which the configuration's ``pipeline``
            divides. The engine of a pipeline is a :class:`~gptpar.deepspeed.engines.pipeline_engine.PipelineEngine`.
        optimizer: instead of the configuration's: one of torch's before its first step, or a function that makes one.
        model_parameters: parameters or groups to be trained; default: all that require a gradient.
        training_data: becomes the returned loader.
        lr_scheduler: instead of the configuration's: one over ``optimizer``, or a function of the returned optimizer.
        distributed_port: the first process's port, if the environment has no ``MASTER_PORT``.
        mpu: an object that describes the axes of processes; refused unless there is data parallelism alone.
        dist_init_required: ``False``: the caller has initialised ``torch.distributed``.
        collate_fn: makes a micro-batch of the loader's samples.
        config, config_params: DeepSpeed's JSON, as a path or a dictionary; the latter is the former name.
        mesh_param: sizes (data-parallel, sequence-parallel); the latter must be 1.
        recording: what :func:`gptpar.deferred_init` returned, if the model was built under it.
        loss_fn: (the model's output, the micro-batch) -> a scalar, for ``train_batch`` and ``eval_batch``; default:
            the output is the loss, or has it as ``loss`` or as the first element of a tuple. Of a list of layers:
            (the last one's output, the labels) -> a scalar; default: the output is the loss.
        former: the engine that has the whole model now, closed once everything is checked; default: it is refused.

    Returns:
        (engine, optimizer, loader, scheduler); all but the engine may be ``None``. No optimizer: it takes no step.

    Raises:
        ConfigError: configuration, optimizer or parameters are wrong; it names everything.
        ModelError: the module cannot be trained; it names every reason.
        GptparError: memory does not suffice.
    """
    before_meeting(distributed_port, dist_init_required)
    rank, device = join_world(TIMEOUT_MINUTES)
    world = dist.get_world_size() if dist.is_initialized() else 1
    with all_or_none(world):
        _check_model(model, recording, former)
        require_types(model_parameters, training_data, collate_fn, recording, loss_fn, mesh_param)
        if (pipeline := model if isinstance(model, PipelineModule) else None) is not None:
            check_pipeline(pipeline, loss_fn, world)
        kind, data = _kind_of(model), world if pipeline is None else pipeline.topology.mesh.data
        take_arguments(args, mpu, mesh_param, world=data, is_pipeline=kind is not ModelKind.MODULE)
        options = read_options(chosen_config(config, config_params, args), args, world=data, model=kind)
    require_same_start({**options.facts(), "whether an engine has the model already": str(former is not None)})
    engine: ModuleEngine | PipelineEngine
    if kind is ModelKind.MODULE:
        topology = make_topology(Mesh(data=world), rank, device)
        engine = _engine_of(model, optimizer, model_parameters, options, topology, recording, loss_fn, former)
    else:
        pipeline = pipeline or make_pipeline(cast(Any, model), loss_fn, options, rank, device)
        engine = engine_of_pipeline(pipeline, optimizer, model_parameters, options, former)
    with all_or_none(world):
        engine.lr_scheduler = _scheduler_of(lr_scheduler, engine)
        engine.data.loader = loader = _loader_of(training_data, engine, collate_fn)
    return engine, engine.optimizer if engine.options.has_optimizer else None, loader, engine.lr_scheduler


def _kind_of(model: object) -> ModelKind:
    if isinstance(model, PipelineModule):
        return ModelKind.PIPELINE
    return ModelKind.MODULE if isinstance(model, nn.Module) else ModelKind.LAYERS


def _scheduler_of(given: ClientScheduler, engine: ModuleEngine | PipelineEngine) -> LRScheduler | None:
    if not engine.options.has_optimizer:
        return None
    return scheduler_of(given, engine.optimizer, engine.options.scheduler)


def _loader_of(
    dataset: Dataset[Any] | None, engine: ModuleEngine | PipelineEngine, collate_fn: Callable[[list[Any]], Any] | None
) -> DataLoader[Any] | None:
    if dataset is None:
        return None
    topology = engine.topology
    return make_loader(dataset, engine.options, topology.position(DATA), topology.mesh.data, collate_fn)


def _engine_of(
    model: Any,
    optimizer: ClientOptimizer,
    model_parameters: Iterable[Any] | None,
    options: EngineOptions,
    topology: Topology,
    recording: Recording | None,
    loss_fn: LossFunction | None,
    former: TrainingEngine | None,
) -> ModuleEngine:
    with all_or_none(topology.mesh.world_size):
        check_graph(options, topology.mesh.world_size)
        if recording is not None:
            recording.check(model)
        else:
            _require_values(model)
        groups, options = groups_of(optimizer, model_parameters, model, options)
        trained = {parameter for group in groups for parameter in group["params"]}
        plan = find_units(model, options.units, dtype=options.dtype, buffers=options.buffer_dtype, trained=trained)
    require_same_model(model, groups)
    close_former(former)
    activity, watch = Activity.of_worker(), OrderWatch(topology)

    def note(place: str, alike: bool) -> None:
        activity.note(place)
        if alike or watch.notes_units:
            watch.note(place)

    stage = ModuleStage(model, plan, note)
    move_buffers(model, topology.device, recording, options.buffer_dtype)
    parts = build_engine(stage, groups, options, topology, activity, watch, recording, wait_for=watch.wait_for)
    parts.engine.gatherer.follow([stage.call_order()], stays=(ROOT,))
    return ModuleEngine(stage, parts, groups, options, loss_fn)


def _check_model(model: object, recording: Recording | None, former: TrainingEngine | None) -> None:
    """Check that this is a model, and that no engine but the former one has it."""
    if not isinstance(model, nn.Module | list | tuple):
        raise TypeError(
            f"gptpar.initialize trains a torch.nn.Module or a list of layers, not a {type(model).__name__}."
        )
    has_former = former is not None and not former.is_closed and former.module is model
    if isinstance(model, nn.Module) and not has_former and are_held(model):
        raise GptparError(
            "the model, or a part of it, is in another engine of gptpar.initialize, which has its weights: call that "
            "one's engine.close() first, on all processes; it gives the weights back."
        )
    if recording is not None and not (isinstance(model, nn.Module) and not isinstance(model, PipelineModule)):
        raise GptparError("recording= is for a module; each LayerSpec is built only where its layer runs anyway.")


def _require_values(model: nn.Module) -> None:
    """Check that parameters and buffers of a model without a recording have values.

    Raises:
        ModelError: some are on the meta device.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ModelError(
            [
                f"{len(empty)} of the model's {len(tensors)} parameters and buffers, {empty[0]} among them, are on the "
                "meta device and have no values: build the model inside `with gptpar.deferred_init() as recording:` "
                "and pass recording=recording, or give it values first (to_empty(device=...), then its initialisation)"
            ]
        )
