"""``gptpar.initialize``: any module on the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from gptpar.activity import Activity
from gptpar.any_module.batches import LossFunction
from gptpar.any_module.build import build_engine
from gptpar.any_module.client_optimizer import ClientOptimizer, groups_of
from gptpar.any_module.dataset import make_loader
from gptpar.any_module.deferred import Recording
from gptpar.any_module.engine import ModuleEngine
from gptpar.any_module.graph import check_graph
from gptpar.any_module.module_stage import ROOT, ModuleStage
from gptpar.any_module.options import EngineOptions, read_options
from gptpar.any_module.schedulers import ClientScheduler, scheduler_of
from gptpar.any_module.units import UnitPlan, find_units
from gptpar.any_module.weights import Weights
from gptpar.topology import Layout, Topology, join_world, make_topology

TIMEOUT_MINUTES = 30.0

Initialized = tuple[ModuleEngine, torch.optim.Optimizer, DataLoader[Any] | None, LRScheduler | None]


def initialize(
    args: object = None,
    model: nn.Module | None = None,
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
        model: the module; its parameters get other memory, and stay the same objects.
        optimizer: an AdamW that has taken no step, or a function from parameters to one; goes before the
            configuration's.
        model_parameters: parameters or groups to be trained; default: all that require a gradient.
        training_data: becomes the returned loader.
        lr_scheduler: over the given optimizer, or a function from the returned one to a scheduler; goes before the
            configuration's.
        collate_fn: of the loader.
        config: DeepSpeed's JSON as a path or a dictionary.
        recording: of the :func:`gptpar.deferred_init` in which the model was built.
        loss_fn: (the model's output, the micro-batch) -> a scalar, for ``train_batch`` and ``eval_batch``; default:
            the output is the loss, or has it as ``loss`` or as the first element of a tuple.

    Returns:
        (engine, optimizer, loader, scheduler); the last two are ``None`` where nothing asks for them.

    Raises:
        ConfigError: with everything that is wrong with configuration, optimizer or parameters.
        ModelError: with every reason why the module cannot be trained.
        GptparError: memory does not suffice.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"gptpar.initialize trains a torch.nn.Module, not a {type(model).__name__}.")
    if recording is not None:
        recording.check(model)
    rank, device = join_world(TIMEOUT_MINUTES)
    world = dist.get_world_size() if dist.is_initialized() else 1
    topology = make_topology(Layout(data=world), rank, device)
    options = read_options(config, args, world=world)
    check_graph(options, world)
    groups = groups_of(optimizer, model_parameters, model, options)
    trained = {parameter for group in groups for parameter in group["params"]}
    plan = find_units(model, options.units, dtype=options.dtype, trained=trained)
    engine = _engine_of(model, plan, groups, options, topology, recording, loss_fn)
    engine.lr_scheduler = scheduler_of(lr_scheduler, engine.optimizer, options.scheduler)
    loader = None
    if training_data is not None:
        loader = make_loader(training_data, options, topology.data_rank, world, collate_fn)
        engine.data.loader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _engine_of(
    model: nn.Module,
    plan: UnitPlan,
    groups: list[dict[str, Any]],
    options: EngineOptions,
    topology: Topology,
    recording: Recording | None,
    loss_fn: LossFunction | None,
) -> ModuleEngine:
    activity = Activity.of_worker()
    stage = ModuleStage(model, plan, lambda path: activity.note(f"unit {path or 'the model'}"))
    move_buffers(model, topology.device, recording)
    engine, host, frozen = build_engine(stage, [group["params"] for group in groups], options, topology, recording)
    if options.compile:
        compile_scopes(model, plan)
    weights = Weights(stage, engine, frozen, topology)
    return ModuleEngine(stage, engine, host, weights, groups, options, topology, activity, loss_fn)


def move_buffers(model: nn.Module, device: torch.device, recording: Recording | None) -> None:
    """Bring buffers to the device; they keep their dtype, and modules that share one go on sharing it."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    if recording is not None:
        recording.make_attributes(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device) if recording is None else recording.make(buffer, device, name)
                module._buffers[name] = moved[buffer]


def compile_scopes(model: nn.Module, plan: UnitPlan, backend: str = "inductor") -> None:
    """Compile each block by itself, its hooks left out; without blocks, the whole model."""
    paths = [scope.path for scope in plan.scopes if scope.path != ROOT] or [ROOT]
    for path in paths:
        module = model.get_submodule(path)
        module.forward = torch.compile(module.forward, backend=backend)  # type: ignore[method-assign]
