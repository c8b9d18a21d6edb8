"""``gptpar.initialize``: any module on the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from gptpar.any_module.agreement import require_same_model
from gptpar.any_module.batches import LossFunction
from gptpar.any_module.build import build_engine, compile_scopes, move_buffers
from gptpar.any_module.client_optimizer import ClientOptimizer, groups_of, options_beside
from gptpar.any_module.dataset import make_loader
from gptpar.any_module.deferred import Recording
from gptpar.any_module.engine import ModuleEngine
from gptpar.any_module.graph import check_graph
from gptpar.any_module.initialize_layers import Layer, check_pipeline, engine_of_pipeline, make_pipeline
from gptpar.any_module.module_stage import ROOT, ModuleStage
from gptpar.any_module.options import EngineOptions, ModelKind, read_options
from gptpar.any_module.order_watch import OrderWatch, name_of_engine
from gptpar.any_module.pipeline_engine import PipelineEngine
from gptpar.any_module.schedulers import ClientScheduler, scheduler_of
from gptpar.any_module.training_engine import TIMEOUT_MINUTES
from gptpar.any_module.units import find_units
from gptpar.any_module.weights import Weights
from gptpar.errors import GptparError
from gptpar.pipeline.module import PipelineModule
from gptpar.system.activity import Activity
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.layout import Layout
from gptpar.topology.world import join_world

Initialized = tuple[ModuleEngine | PipelineEngine, torch.optim.Optimizer, DataLoader[Any] | None, LRScheduler | None]


def initialize(
    args: object = None,
    model: nn.Module | Sequence[Layer] | None = None,
    optimizer: ClientOptimizer = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: ClientScheduler = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    recording: Recording | None = None,
    loss_fn: LossFunction | None = None,
) -> Initialized:
    """Train a module with ZeRO, offload and whatever else a DeepSpeed configuration asks for, without changing it.

    Every process calls it, with the same model; the first process's values count. On several processes
    ``torch.distributed`` is initialised if it is not yet.

    Args:
        args: a command line whose ``deepspeed_config`` may name the configuration.
        model: the module; its parameters get other memory, and stay the same objects. Or a
            :class:`~gptpar.pipeline.module.PipelineModule`, or a list of its layers, which the configuration's
            ``pipeline`` divides: the engine is a :class:`~gptpar.any_module.pipeline_engine.PipelineEngine`.
        optimizer: an AdamW that has taken no step, or a function from parameters to one; goes before the
            configuration's.
        model_parameters: parameters or groups to be trained; default: all that require a gradient.
        training_data: becomes the returned loader.
        lr_scheduler: over the given optimizer, or a function from the returned one to a scheduler; goes before the
            configuration's.
        collate_fn: of the loader.
        config: DeepSpeed's JSON as a path or a dictionary.
        recording: what :func:`gptpar.deferred_init` returned, if the model was built under it.
        loss_fn: (the model's output, the micro-batch) -> a scalar, for ``train_batch`` and ``eval_batch``; default:
            the output is the loss, or has it as ``loss`` or as the first element of a tuple. Of a list of layers:
            (the last one's output, the labels) -> a scalar; default: the output is the loss.

    Returns:
        (engine, optimizer, loader, scheduler); the last two are ``None`` where nothing asks for them.

    Raises:
        ConfigError: with everything that is wrong with configuration, optimizer or parameters.
        ModelError: with every reason why the module cannot be trained.
        GptparError: memory does not suffice.
    """
    if not isinstance(model, nn.Module | list | tuple):
        raise TypeError(
            f"gptpar.initialize trains a torch.nn.Module or a list of layers, not a {type(model).__name__}."
        )
    rank, device = join_world(TIMEOUT_MINUTES)
    world = dist.get_world_size() if dist.is_initialized() else 1
    engine: ModuleEngine | PipelineEngine
    if isinstance(model, nn.Module) and not isinstance(model, PipelineModule):
        options = read_options(config, args, world=world)
        check_graph(options, world)
        topology = make_topology(Layout(data=world), rank, device)
        engine = _engine_of(model, optimizer, model_parameters, options, topology, recording, loss_fn)
    else:
        if recording is not None:
            raise GptparError("recording= is for a module; each LayerSpec is built only where its layer runs anyway.")
        if isinstance(model, PipelineModule):
            check_pipeline(model, loss_fn, world)
            options = read_options(config, args, world=model.topology.layout.data, model=ModelKind.PIPELINE)
            pipeline = model
        else:
            options = read_options(config, args, world=world, model=ModelKind.LAYERS)
            pipeline = make_pipeline(model, loss_fn, options, rank, device)
        engine = engine_of_pipeline(pipeline, optimizer, model_parameters, options)
    engine.lr_scheduler = scheduler_of(lr_scheduler, engine.optimizer, options.scheduler)
    loader = None
    if training_data is not None:
        topology = engine.topology
        loader = make_loader(training_data, options, topology.data_rank, topology.layout.data, collate_fn)
        engine.data.loader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _engine_of(
    model: nn.Module,
    optimizer: ClientOptimizer,
    model_parameters: Iterable[Any] | None,
    options: EngineOptions,
    topology: Topology,
    recording: Recording | None,
    loss_fn: LossFunction | None,
) -> ModuleEngine:
    if recording is not None:
        recording.check(model)
    options = options_beside(optimizer, options)
    groups = groups_of(optimizer, model_parameters, model, options)
    trained = {parameter for group in groups for parameter in group["params"]}
    plan = find_units(model, options.units, dtype=options.dtype, trained=trained)
    require_same_model(model, topology)
    activity, watch = Activity.of_worker(), OrderWatch(topology)

    def note(what: str) -> None:
        activity.note(what)
        watch.note(what)

    stage = ModuleStage(model, plan, note)
    move_buffers(model, topology.device, recording)
    engine, host, frozen = build_engine(
        stage, [group["params"] for group in groups], options, topology, recording, watch.wait_for
    )
    if engine.gatherer.gathers_in_call_order:
        watch.start(name_of_engine(topology))
    engine.gatherer.follow([stage.call_order()], stays=(ROOT,))
    if options.compile:
        compile_scopes(stage)
    weights = Weights(stage, engine, frozen, topology)
    return ModuleEngine(stage, engine, host, weights, groups, options, topology, activity, loss_fn, watch)
