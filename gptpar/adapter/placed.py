"""Parameters that remain the user's objects and are in the engine's memory, divided into units by a plan."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.adapter.guards.not_copied import NotCopied
from gptpar.adapter.guards.read_guard import ReadGuard
from gptpar.adapter.units import FlatUnit, UnitPlan
from gptpar.engine.engine import EngineStage
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.pipeline.stage import place_parameter


@dataclass(frozen=True)
class TiedUnit:
    """A unit of which several stages of a pipeline have copies.

    Attributes:
        stages: in ascending order; this process's is one of them.
        group: the processes with a copy, over which its gradients are summed.
    """

    stages: tuple[int, ...]
    group: dist.ProcessGroup


class PlacedParameters(NotCopied):
    """A module, or the layers of a pipeline that this process has, as the engine uses them.

    Args:
        plan: the units.
        parameters: by first name.

    Attributes:
        plan, parameters: as given; frozen parameters are included.
        stages: the engine's stages, which have these parameters.
        roots: path -> module, which together have all parameters and buffers; paths are the same in every layout.
        tied: units that other stages have, too; those stages have them in the same order.
        undo: removes the engine's hooks from the modules when it is closed.
        is_watching: whether every operator is observed already, so that parameters are gathered before it reads them.
    """

    is_watching = False

    def __init__(self, plan: UnitPlan, parameters: Mapping[str, nn.Parameter]):
        self.plan, self.parameters = plan, dict(parameters)
        self.stages: Sequence[EngineStage] = ()
        self.roots: Mapping[str, nn.Module] = {}
        self.tied: dict[str, TiedUnit] = {}
        self.undo = contextlib.ExitStack()
        self._unit_named = {name: unit for unit in plan.units for name in unit.parameters}
        self._units_in: dict[int, list[tuple[int, FlatUnit]]] = {}

    def scope_module(self, path: str) -> nn.Module:
        """The module of a scope: the scope's parameters are gathered before its forward."""
        raise NotImplementedError

    def read_guard(self, gatherer: ParameterGatherer, meets: Callable[[str], bool] | None = None) -> ReadGuard:
        """A guard that gathers a released parameter when it is read; ``meets``: see :class:`ReadGuard`."""
        units = {unit.name: unit.parameters for unit in self.plan.units}
        return ReadGuard(self.parameters, units, gatherer, lambda: self.is_watching, meets)

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        """Point parameters to their memory, given by first name."""
        first: dict[tuple[int, FlatUnit], int] = {}
        for name, memory in storage.items():
            key, start = (memory.untyped_storage()._cdata, self._unit_named[name]), _first_byte(memory)
            first[key] = min(first.get(key, start), start)
            place_parameter(self.parameters[name], memory)
        for (memory_id, unit), start in sorted(first.items(), key=lambda item: item[1]):
            self._units_in.setdefault(memory_id, []).append((start, unit))

    def scope_of(self, tensor: Any) -> str | None:
        """The scope in whose memory a tensor is; ``None`` if it is in no parameter's memory."""
        unit = self.unit_in(tensor)
        return None if unit is None else unit.scope

    def unit_in(self, tensor: Any) -> FlatUnit | None:
        """The unit in whose memory a tensor is; ``None`` if it is in no parameter's memory."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        units = self._units_in.get(tensor.untyped_storage()._cdata, [])
        if len(units) < 2:
            return units[0][1] if units else None
        start = _first_byte(tensor)  # units that stay are in a row, in one memory
        return units[max(0, bisect_right(units, start, key=itemgetter(0)) - 1)][1]


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize
