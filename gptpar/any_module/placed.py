"""Parameters that stay the user's objects and live in the engine's memory, divided into units by a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.any_module.not_copied import NotCopied
from gptpar.any_module.units import FlatUnit, UnitPlan
from gptpar.engine.engine import EngineStage
from gptpar.pipeline.stage import place_parameter


@dataclass(frozen=True)
class TiedUnit:
    """A unit that several stages of a pipeline have a copy of.

    Attributes:
        stages: in rising order; this process's is one of them.
        group: the processes with a copy, over which its gradients are summed.
    """

    stages: tuple[int, ...]
    group: dist.ProcessGroup


class PlacedParameters(NotCopied):
    """A module, or the layers of a pipeline that this process has, as the engine sees them.

    Args:
        plan: the units.
        parameters: by first name.

    Attributes:
        plan, parameters: as given, frozen ones too.
        stages: what the engine calls; all are of these parameters.
        tied: units that other stages have, too, the same on all of these and in the same order.
        undo: takes the engine's hooks from the modules, when it is closed.
        is_watching: whether every operator is looked at already, which brings what it reads.
    """

    is_watching = False

    def __init__(self, plan: UnitPlan, parameters: Mapping[str, nn.Parameter]):
        self.plan, self.parameters = plan, dict(parameters)
        self.stages: Sequence[EngineStage] = ()
        self.tied: dict[str, TiedUnit] = {}
        self.undo = contextlib.ExitStack()
        self._unit_named = {name: unit for unit in plan.units for name in unit.parameters}
        self._unit_of: dict[int, FlatUnit] = {}

    def scope_module(self, path: str) -> nn.Module:
        """The module before whose forward a scope's parameters are brought."""
        raise NotImplementedError

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        """Give these parameters, by first name, their memory."""
        for name, memory in storage.items():
            self._unit_of[memory.untyped_storage()._cdata] = self._unit_named[name]
            place_parameter(self.parameters[name], memory)

    def scope_of(self, tensor: Any) -> str | None:
        """The scope whose memory a tensor is in; ``None``: it is no parameter's."""
        unit = self.unit_in(tensor)
        return None if unit is None else unit.scope

    def unit_in(self, tensor: Any) -> FlatUnit | None:
        """The unit whose memory a tensor is in; ``None``: it is no parameter's."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        return self._unit_of.get(tensor.untyped_storage()._cdata)
