"""Presents a pipeline's layers to the engine: each layer is a scope with a unit for each kind of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from gptpar.adapter.built_layers import BuiltLayer
from gptpar.adapter.guards.refusals import problems_of
from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.adapter.placed import PlacedParameters, TiedUnit
from gptpar.adapter.units import Scope, TensorNames, UnitPlan, dtypes_of, flat_units, kinds_of
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.errors import ModelError
from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline.stage import Stage, call_directly


class LayerStages(PlacedParameters):
    """The layers of a pipeline that this process has.

    Args:
        pipeline: whose layers have values.
        plan: the division of these layers into units.
    """

    def __init__(self, pipeline: PipelineModule, plan: UnitPlan):
        layers = layers_of(pipeline)
        super().__init__(plan, _parameters_of(layers))
        self.roots = layers
        self.stages = [_LayerStage(stage, self) for stage in pipeline.stages_here]
        trained = {unit.name for unit in plan.units if unit.trainable}
        units_of = {scope.path: scope.units for scope in plan.scopes}
        self.tied = {
            unit: TiedUnit(pipeline.tied_stages[layer], group)
            for layer, group in pipeline.tied_groups.items()
            for unit in units_of.get(layer, ())
            if unit in trained
        }

    def scope_module(self, path: str) -> nn.Module:
        """See :meth:`PlacedParameters.scope_module`."""
        return self.roots[path]


class _LayerStage:
    """A virtual stage, whose layers may have several units each (:class:`~gptpar.engine.engine.EngineStage`)."""

    def __init__(self, stage: Stage, owner: LayerStages):
        self._stage, self._owner = stage, owner
        names = stage.layers_by_name()
        self._units = {scope.path: scope.units for scope in owner.plan.scopes if scope.path in names}
        units = [unit for unit in owner.plan.units if unit.scope in self._units]
        self._names = [name for unit in units for name in unit.parameters]
        self._trained = [name for unit in units if unit.trainable for name in unit.parameters]

    def call_through(self, gatherer: ParameterGatherer) -> None:
        self._stage.call_through(gatherer)
        self._owner.undo.callback(self._stage.call_through, call_directly)

    def call_order(self) -> list[str]:
        return self._stage.call_order()

    def units_by_layer(self) -> dict[str, tuple[str, ...]]:
        return self._units

    def lookups(self) -> Collection[str]:
        return ()

    def global_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self._owner.parameters[name] for name in self._trained}

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        self._owner.place({name: storage[name] for name in self._names})


def layers_of(pipeline: PipelineModule) -> dict[str, nn.Module]:
    """Name -> layer, of all layers on this process, in forward order; a tied one occurs once."""
    return {name: layer for stage in pipeline.stages_here for name, layer in stage.layers_by_name().items()}


def _parameters_of(layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """By first name."""
    return {f"{name}.{local}": p for name, layer in layers.items() for local, p in layer.named_parameters()}


def plan_layers(
    layers: Mapping[str, nn.Module],
    *,
    dtype: torch.dtype | None,
    buffers: torch.dtype | None,
    trained: Collection[nn.Parameter],
) -> UnitPlan:
    """Divide layers into units.

    Args:
        layers: by name; they do not share parameters.
        dtype, buffers: that parameters and buffers will have (see :func:`~gptpar.adapter.units.dtypes_of`).
        trained: the parameters in the optimizer's groups.

    Raises:
        ModelError: they cannot be divided; it names every reason.
    """
    problems = [f"layer {name}: {problem}" for name, layer in layers.items() for problem in problems_of(layer)]
    problems += [
        f"{name} has no values: let the layers be built with them, without build=build_on_meta"
        for name, parameter in _parameters_of(layers).items()
        if parameter.is_meta
    ]
    if problems:
        raise ModelError(problems)
    names = TensorNames()
    scope_of: dict[str, str] = {}
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name, remove_duplicate=False):
            names.add(path, module)
        scope_of |= dict.fromkeys(_parameters_of({name: layer}), name)
        dtypes |= dtypes_of(layer, dtype, buffers)
    parameters = names.parameters()
    units = flat_units(parameters, scope_of, kinds_of(parameters, dtypes, trained))
    scopes = (Scope(name, tuple(unit.name for unit in units if unit.scope == name)) for name in layers)
    return UnitPlan(tuple(scope for scope in scopes if scope.units), units, tuple(names.buffers()), names.aliases())


def sharing_problems(specs: Sequence[LayerSpec]) -> Iterator[str]:
    """Problems of parameters that several layers share without being declared tied; all processes see all layers."""
    owners: dict[torch.Tensor, str] = {}
    for spec in specs:
        if isinstance(spec, BuiltLayer):
            for local, parameter in spec.module.named_parameters():
                owner = owners.setdefault(parameter, spec.name)
                if owner != spec.name:
                    yield (
                        f"{owner} and {spec.name} share the parameter {local}: write both as "
                        "TiedLayerSpec(key, ...), so that stages which both have it sum its gradients."
                    )
