"""Divides a list of layers into the stages of a pipeline, by their costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec, build_on_meta
from gptpar.model.spec import ModelSpec
from gptpar.pipeline.partition import balance, partition


@dataclass(frozen=True)
class LayerSplit:
    """The assignment of layers to stages.

    Attributes:
        bounds: part k holds layers ``bounds[k]`` to ``bounds[k + 1] - 1``; stage r has parts r, r + num_stages, ...
        parameters: of each stage.
        costs: of each stage, in the unit of the partition method.
    """

    bounds: list[int]
    parameters: list[float]
    costs: list[float]

    @property
    def efficiency(self) -> float:
        """Mean cost of a stage over that of the heaviest: 1 is perfect balance."""
        return sum(self.costs) / (len(self.costs) * max(self.costs)) if max(self.costs) else 1.0

    def layers_of(self, stage: int) -> list[int]:
        """Indices of a stage's layers."""
        parts = range(stage, len(self.bounds) - 1, len(self.costs))
        return [layer for part in parts for layer in range(self.bounds[part], self.bounds[part + 1])]

    def tied_stages(self, specs: Sequence[LayerSpec]) -> dict[str, tuple[int, ...]]:
        """Name of a tied layer that several stages have -> these stages."""
        found: dict[str, set[int]] = {}
        for stage in range(len(self.costs)):
            for spec in (specs[layer] for layer in self.layers_of(stage)):
                if isinstance(spec, TiedLayerSpec):
                    found.setdefault(spec.name, set()).add(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items() if len(stages) > 1}


def split_model(model: ModelSpec, num_stages: int, num_virtual_stages: int, method: str) -> LayerSplit:
    """Divide a model into stages by its layers' costs.

    Args:
        model: described without tensor parallelism, so that all processes divide it alike.
        num_stages, num_virtual_stages, method: see :class:`~gptpar.adapter.pipeline_module.PipelineModule`.

    Raises:
        ConfigError: the method cannot divide this model.
    """
    return split_layers(model.specs, num_stages, num_virtual_stages, method, model.flops, model.parameters)


def split_layers(
    specs: Sequence[LayerSpec],
    num_stages: int,
    num_virtual_stages: int,
    method: str,
    flops: Sequence[float],
    parameters: Sequence[int] | None = None,
) -> LayerSplit:
    """Divide a list of layers; see :func:`split_model`.

    Args:
        flops: of each layer; none: layers are as costly as their parameters are many.
        parameters: of each layer; ``None``: they are counted.
    """
    if parameters is None:
        parameters = [sum(p.numel() for p in build_on_meta(spec).parameters()) for spec in specs]
    kinds, num_parts = [spec.cls.__name__ for spec in specs], num_stages * num_virtual_stages
    costs = flops or parameters
    bounds = partition(method, num_parts, parameters=parameters, flops=costs, kinds=kinds, num_stages=num_stages)
    return LayerSplit(bounds, *(balance(each, bounds, num_stages) for each in (parameters, costs)))
