"""Builds the engine of any module: units, memory, the CPU optimizer, and the module's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gptpar.adapter.compiled_blocks import compile_blocks
from gptpar.adapter.deferred import Recording
from gptpar.adapter.engine_parts import EngineParts
from gptpar.adapter.guards.failed_passes import FailedPasses
from gptpar.adapter.guards.order_watch import OrderWatch, name_of_engine
from gptpar.adapter.matrix_groups import updates_by_group
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.placed import PlacedParameters
from gptpar.adapter.tied_weight import tied_unit
from gptpar.adapter.units import FlatUnit, UnitPlan
from gptpar.adapter.values import move_aside, take_values, value_of
from gptpar.adapter.weights import Weights
from gptpar.engine.data_axes import DataAxes, wait_without_limit
from gptpar.engine.engine import Engine, EngineSettings
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import GroupOf, Unit
from gptpar.offload.build import Names, make_host_optimizer
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.optim.update import Update
from gptpar.system.activity import Activity
from gptpar.topology.agreement import all_or_none
from gptpar.topology.groups import Topology
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import COPIES
from gptpar.topology.placement import ParameterInfo

NOT_DRAWN = Constant(0.0)
"""A placeholder for the initial values of a module that has its own."""


def settings_of(options: EngineOptions, dtypes: Collection[torch.dtype], world: int) -> EngineSettings:
    """The number formats of the engine's state and of its messages.

    Args:
        options: of the engine.
        dtypes: of the trained parameters; sums and master weights are at least as wide as the widest.
        world: number of processes.
    """
    widest = torch.float16 if not dtypes else next(iter(dtypes))
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    wide = torch.promote_types(widest, torch.float32)
    adds = options.batch.accumulation_steps > 1 or world > 1 or len(set(dtypes)) > 1
    return EngineSettings(widest, torch.bfloat16 if options.reduce_in_bf16 else wide, adds)


def unit_of(unit: FlatUnit, parameters: Mapping[str, nn.Parameter], shards: int, group_of: GroupOf) -> Unit:
    """Lay out a unit's parameters."""
    infos = {name: _info_of(parameters[name]) for name in unit.parameters}
    return replace(Unit.of(unit.name, infos, shards, group_of=group_of), dtype=unit.dtype)


def _info_of(parameter: nn.Parameter) -> ParameterInfo:
    usual = torch.empty(parameter.shape, device="meta").stride()
    strides = None if parameter.stride() == usual else parameter.stride()
    return ParameterInfo(parameter.shape, NOT_DRAWN, strides=strides)


def lay_out(
    plan: UnitPlan,
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Collection[nn.Parameter]],
    options: EngineOptions,
    place: Place,
    *,
    tied: Mapping[str, Sequence[int]] | None = None,
) -> tuple[ParameterTable, list[Unit]]:
    """(the table of the trained parameters, the units of the frozen ones).

    Args:
        plan: the division into units.
        parameters: by first name.
        groups: parameters of each group of the optimizer.
        options: of the engine.
        place: this process's position on the mesh.
        tied: unit -> the stages that have a copy of it.
    """
    number = {parameter: place for place, group in enumerate(groups) for parameter in group}
    shards = place.shards(COPIES)
    units = [unit_of(unit, parameters, shards, lambda name, _: number.get(parameters[name], 0)) for unit in plan.units]
    trained = [unit for unit, flat in zip(units, plan.units, strict=True) if flat.trainable]
    frozen = [unit for unit, flat in zip(units, plan.units, strict=True) if not flat.trainable]
    return ParameterTable(trained, place, ratio=options.offload.least_ratio, tied=tied), frozen


def build_engine(
    stage: PlacedParameters,
    groups: Sequence[Mapping[str, Any]],
    options: EngineOptions,
    topology: Topology,
    activity: Activity,
    watch: OrderWatch,
    recording: Recording | None = None,
    *,
    wait_for: Callable[[Any], None] = wait_without_limit,
) -> EngineParts:
    """The engine of a module and what surrounds it; all processes call this together.

    Parameters keep the module's values; of several data-parallel processes, the first one's values count.

    Args:
        stage: the module, or the layers that this process has.
        groups: of the optimizer.
        options: of the engine.
        topology: this process's place.
        recording: makes the values of parameters without memory.
        wait_for: waits for collectives over the data axis. With one of its own, ``watch`` notes units where they are
            gathered in the order of calls.

    Raises:
        GptparError: host memory does not suffice for offload; parameters may then be in host memory.
    """
    data, device, plan = DataAxes.of(topology, options.zero_stage, wait_for), topology.device, stage.plan
    tied = {unit: tie.stages for unit, tie in stage.tied.items()}
    of_group = [group["params"] for group in groups]
    table, frozen = lay_out(plan, stage.parameters, of_group, options, data.place, tied=tied)
    dtypes = _over_stages({unit.dtype for unit in plan.units if unit.trainable}, topology)
    settings = settings_of(options, dtypes, topology.mesh.world_size)
    on_host = options.offload.cpu_parameters
    if not on_host and not table.offloaded():  # offload needs the host's memory itself
        move_aside(stage.parameters.values(), device)
    values = {name: value_of(name, parameter, recording) for name, parameter in stage.parameters.items()}
    with all_or_none(topology.mesh.world_size):  # memory may be short on one machine only
        parameters = ParameterMemory([*table.units, *frozen], data, settings.dtype, device, on_host=on_host)
        tied_weight = tied_unit(stage, table, options, topology.mesh.world_size)
        order = [unit for scope in plan.scopes for unit in scope.units]
        updates = updates_by_group(groups, options.by_matrix, options.update)
        host = _host_optimizer(table, parameters, settings, options, updates, device, tied_weight, order)
    engine = Engine(
        stage.stages,
        table,
        parameters,
        data,
        settings,
        updates,
        options.max_norm,
        device,
        host,
        tied={unit: tie.group for unit, tie in stage.tied.items()},
        frozen=frozen,
        families=[(group,) for group in range(len(groups))],
        counts_arrivals=True,
    )
    if engine.gatherer.acquires:
        engine.gatherer.watch = stage.read_guard(engine.gatherer, watch.meets)
    take_values(engine, frozen, values, topology)
    name = name_of_engine(topology)
    watch.start(name, notes_units=wait_for is not wait_without_limit and engine.gatherer.gathers_in_call_order)
    compile_blocks(stage, options, device)
    weights, failed = Weights(stage, engine, frozen, topology), FailedPasses(topology, name, watch)
    return EngineParts(engine, host, weights, topology, activity, watch, failed)


def _over_stages(dtypes: set[torch.dtype], topology: Topology) -> set[torch.dtype]:
    """The dtypes of all stages: tensors that they sum need a common dtype."""
    return dtypes if topology.mesh.pipeline == 1 else set().union(*topology.of_all(dtypes))


def move_buffers(
    model: nn.Module, device: torch.device, recording: Recording | None, dtype: torch.dtype | None
) -> None:
    """Move buffers to the device; modules that share one still do. ``dtype``: of floats; ``None``: they keep theirs."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    if recording is not None:
        recording.make_attributes(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            if (buffer.device, buffer.dtype) != (device, wanted):
                if buffer not in moved:
                    value = buffer if recording is None else recording.make(buffer, device, name)
                    moved[buffer] = value.to(device, wanted)
                module._buffers[name] = moved[buffer]


def _host_optimizer(
    table: ParameterTable,
    parameters: ParameterMemory,
    settings: EngineSettings,
    options: EngineOptions,
    updates: Sequence[Update],
    device: torch.device,
    tied_weight: Unit | None,
    order: Sequence[str],
) -> HostOptimizer | None:
    """The CPU optimizer of a module.

    Args:
        order: the units as forward passes wait for them. The whole model's come first: they are brought before anything
            is called, wherever the model defines them.
    """
    pieces = sorted(table.offloaded(), key=lambda piece: order.index(piece.unit))
    return make_host_optimizer(
        options.offload,
        updates,
        pieces,
        {piece.unit: parameters.shards[piece.unit][table.on_device[piece.unit] :] for piece in pieces},
        device,
        settings.dtype,
        settings.wide,
        tied_weight,
        clip_grad=options.max_norm,
        itemsize=(settings.wide if settings.adds_gradients else settings.dtype).itemsize,
        names=Names("gptpar.initialize", '"speculation": "on"', "zero_optimization.offload_optimizer.ratio"),
    )
