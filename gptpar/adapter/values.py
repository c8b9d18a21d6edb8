"""Copies a module's values into the engine's memory; before, they may wait in a limited share of host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from gptpar.adapter.deferred import Recording
from gptpar.engine.engine import Engine
from gptpar.engine.units import Unit
from gptpar.system.host import available_memory, place_on_machine
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA

Value = Callable[[], torch.Tensor]
"""Makes or finds a parameter's value, on any device."""

MAX_FRACTION_OF_HOST = 0.5
"""The fraction of the host's free memory that all processes' parameters may take while they wait."""


def move_aside(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move parameters from an accelerator to host memory, until the engine copies their values.

    The engine's memory for parameters, gradients and optimizer state is contiguous, and allocated before the first
    value is copied. Otherwise the device would hold the model twice. It stays if host memory is too small.
    """
    there = [parameter for parameter in parameters if parameter.device.type == device.type != "cpu"]
    num_bytes = sum(parameter.nbytes for parameter in there)
    if num_bytes * place_on_machine()[1] <= MAX_FRACTION_OF_HOST * available_memory():
        wait_on_host(there)


def wait_on_host(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters memory on the host with the same values; one after the other, each frees its old memory."""
    for parameter in parameters:
        parameter.data = parameter.data.to("cpu", copy=True)


def value_of(name: str, parameter: nn.Parameter, recording: Recording | None) -> Value:
    """A parameter's own value, or the one that was recorded.

    Args:
        name: for errors.
        recording: makes the values of parameters without memory.
    """
    if recording is not None and parameter.is_meta:
        meta = parameter.data
        return lambda: recording.make(meta, "cpu", name)
    value = parameter.data
    return lambda: value


@torch.no_grad()
def take_values(engine: Engine, frozen: Sequence[Unit], values: dict[str, Value], topology: Topology) -> None:
    """Copy a module's values to master weights and parameters; the first process's values count.

    Args:
        engine: has the memory.
        frozen: units that are not trained.
        values: by first name. Each is dropped once it is copied, a trained parameter's before the next one's.
        topology: this process's place.
    """
    weights = engine.optimizer.parts("weights")

    def taken(name: str) -> torch.Tensor:
        return _agreed(values.pop(name)(), topology.group(DATA), engine.device)

    def take(name: str) -> None:
        value = taken(name)
        if name in weights:
            weights[name].fill(value)

    for name in engine.table.params:
        take(name)
    for unit in frozen:
        engine.parameters.fill(unit, {name: taken(name) for name in unit.params})
    engine.publish()


def _agreed(value: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """The first process's value."""
    value = value.to(device)
    if group is not None:
        value = value.contiguous().clone()
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value
