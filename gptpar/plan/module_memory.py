"""Predicts the memory that :func:`gptpar.initialize` takes for a module; nothing is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gptpar.adapter.build import lay_out, settings_of
from gptpar.adapter.matrix_groups import divided, updates_by_group
from gptpar.adapter.options import EngineOptions, read_options
from gptpar.adapter.units import find_units
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.ranges import Home
from gptpar.engine.reducer import MAX_IN_FLIGHT
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.errors import ConfigError, is_whole, wrong_type
from gptpar.offload.buckets import BUCKET_ELEMENTS, StateSize
from gptpar.offload.gpu_transfers import ring_bytes
from gptpar.plan.states import gradient_bytes, state_bytes
from gptpar.reporting.banner import format_bytes, format_count
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes of one process, without activations.

    Attributes:
        num_parameters: number of parameters of the whole model.
        world: number of data-parallel processes.
        parameters: model parameters on the device: whole, or this process's shards if they are gathered before use.
        buffers: the module's buffers.
        gradients: gradients that are kept until the step.
        optimizer: master weights and moments of the elements that the device updates.
        passing: the most that exists for a short time only: units that are gathered, and gradients on their way.
        host_parameters: shards in host memory.
        host_optimizer: master weights and moments of the elements that the CPU updates.
        host_transfers: pinned memory for copies between device and host.
        double_buffers: buffers for updates before the gradient's norm is known. With ``"speculation": "auto"`` a run
            makes as many as free host memory allows, and they do not count in :attr:`host`.
        double_buffers_count: whether they count in :attr:`host`.
        on_disk: optimizer state in files.
    """

    num_parameters: int
    world: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    passing: int
    host_parameters: int
    host_optimizer: int
    host_transfers: int
    double_buffers: int
    double_buffers_count: bool
    on_disk: int

    @property
    def device(self) -> int:
        """Bytes of a GPU's memory."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.passing

    @property
    def host(self) -> int:
        """Bytes of a machine's memory for each of its processes."""
        double = self.double_buffers if self.double_buffers_count else 0
        return self.host_parameters + self.host_optimizer + self.host_transfers + double

    def __str__(self) -> str:
        optional = "double buffers" + ("" if self.double_buffers_count else ", where memory is free")
        rows = [
            ("parameters", self.parameters, self.host_parameters),
            ("buffers of the module", self.buffers, 0),
            ("gradients", self.gradients, 0),
            ("master weights and moments", self.optimizer, self.host_optimizer),
            (optional, 0, self.double_buffers),
            ("temporary; pinned, for transfers", self.passing, self.host_transfers),
            ("together", self.device, self.host),
        ]
        shown = [row for row in rows if row[1] or row[2]]
        lines = [f"{name:<38}{_size(device):>12}{_size(host):>12}" for name, device, host in shown]
        head = f"{format_count(self.num_parameters)} parameters, {self.world} process{'es' * (self.world > 1)}"
        disk = [f"and {format_bytes(self.on_disk)} of disk"] * bool(self.on_disk)
        about = "each process, without activations:"
        return "\n".join([f"{head}; {about}", f"{'':<38}{'device':>12}{'host':>12}", *lines, *disk])


def estimate_memory(
    model: nn.Module, config: str | os.PathLike[str] | Mapping[str, Any], world: int = 1, *, device_type: str = "cuda"
) -> ModuleMemory:
    """Predict the memory that the engine of :func:`gptpar.initialize` takes on each process, without activations.

    Nothing is allocated; the model may be on the meta device (:func:`gptpar.deferred_init`).

    Args:
        model: any module.
        config: DeepSpeed's JSON, as ``initialize`` takes it.
        world: number of data-parallel processes.
        device_type: ``cuda`` or ``cpu``; on a CPU there are no copies between device and host.

    Returns:
        Bytes by purpose; ``print`` shows them as a table.

    Raises:
        ConfigError, ModelError: as from ``initialize``.
    """
    _require_types(model, world)
    world = int(world)
    options = read_options(config, world=world)
    plan = find_units(model, options.units, dtype=options.dtype, buffers=options.buffer_dtype)
    data = DataAxes.of(Topology(Mesh(data=world), 0, torch.device("cpu")), options.zero_stage)
    parameters = dict(model.named_parameters())
    groups = _groups(parameters, options, model)
    updates = updates_by_group(groups, options.by_matrix, options.update)
    table, frozen = lay_out(plan, parameters, [group["params"] for group in groups], options, data.place)
    settings = settings_of(options, {unit.dtype for unit in plan.units if unit.trainable}, world)
    wide = settings.wide.itemsize
    gradient = settings.gradient_dtype.itemsize
    passes = options.batch.accumulation_steps
    units, on_host = [*table.units, *frozen], options.offload.cpu_parameters
    stays = data.zero_stage < 3 and not on_host
    # If the optimizer works on the parameters themselves, they count as its master weights.
    shared = _masters_are_parameters(table, frozen, options, settings.wide)
    states = StateSize.of(table.offloaded(), updates, wide).num_bytes
    in_memory = states if options.offload.optimizer_nvme_path is None else 0
    return ModuleMemory(
        num_parameters=sum(p.numel() for p in parameters.values()),
        world=world,
        parameters=0 if shared or on_host else _held(units, stays),
        buffers=sum(b.nbytes for b in model.buffers()),
        gradients=gradient_bytes(table, gradient, data.zero_stage, passes),
        optimizer=state_bytes(table.device_group_ranges(), updates, table.length(Home.DEVICE), wide),
        passing=_gathered(units, stays) + _leaving(table, data.zero_stage, gradient, passes),
        host_parameters=_held(units, False) if on_host else 0,
        host_optimizer=in_memory,
        host_transfers=_ring(table, gradient) if device_type == "cuda" else 0,
        double_buffers=0 if options.offload.offload_speculation == "off" else in_memory,
        double_buffers_count=options.offload.offload_speculation == "on",
        on_disk=states - in_memory,
    )


def _groups(parameters: Mapping[str, nn.Parameter], options: EngineOptions, model: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups if everything trainable is trained."""
    groups = [{"params": [p for p in parameters.values() if p.requires_grad]}]
    return groups if options.by_matrix is None else divided(groups, options.by_matrix, {}, model)[0]


def _masters_are_parameters(
    table: ParameterTable, frozen: Sequence[Unit], options: EngineOptions, wide: torch.dtype
) -> bool:
    """Whether the optimizer works on the parameters themselves."""
    all_here = not table.elements(Home.HOST) and not options.offload.cpu_parameters
    return all_here and not frozen and all(unit.shards == 1 and unit.dtype == wide for unit in table.units)


def _held(units: Sequence[Unit], stays: bool) -> int:
    """Bytes of the units' parameters: whole if they stay, else this process's shards."""
    return sum(_bytes(unit) // (1 if stays else unit.shards) for unit in units)


def _gathered(units: Sequence[Unit], stays: bool) -> int:
    """Bytes of gathered parameters: the three largest units, for the model's own unit, a block and the next block."""
    sizes = sorted(map(_bytes, units))
    return 0 if stays else sum(sizes[-3:])


def _leaving(table: ParameterTable, zero_stage: int, size: int, passes: int) -> int:
    """Bytes of gradients that the CPU has not used yet, or that are being reduced."""
    offloaded = size * table.length(Home.HOST) if passes == 1 else 0
    if zero_stage < 2:
        return offloaded
    largest = max((unit.length + unit.shard_length for unit in table.units), default=0)
    return offloaded + (1 + MAX_IN_FLIGHT) * largest * size


def _ring(table: ParameterTable, size: int) -> int:
    lengths = [unit.shard_length - table.on_device[unit.name] for unit in table.units]
    lengths = [length for length in lengths if length]
    if not lengths:
        return 0
    buckets = sum(-(-length // BUCKET_ELEMENTS) for length in lengths)
    return ring_bytes(buckets, min(BUCKET_ELEMENTS, max(lengths)) * size)


def _bytes(unit: Unit) -> int:
    assert unit.dtype is not None
    return unit.length * unit.dtype.itemsize


def _size(count: int) -> str:
    return format_bytes(count) if count else "-"


def _require_types(model: object, world: object) -> None:
    problems = [] if isinstance(model, nn.Module) else [wrong_type("model", model, "a torch.nn.Module is needed")]
    if not is_whole(world) or world < 1:
        problems.append(f"world is {world!r}: it is the number of data-parallel processes, at least 1.")
    if problems:
        raise ConfigError(problems)
