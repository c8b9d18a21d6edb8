"""``Layers``: a model's layers as every plan needs them, each with its cost and its unit. Pure.

Nothing is allocated: of equal layers, one is built on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gptpar.config import ModelConfig, OptimizerConfig
from gptpar.config.roles import Role
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.model.experts.dispatch import ALL_EXPERTS, ExpertAxis
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import LayerSpec
from gptpar.model.spec import ModelSpec
from gptpar.optim.parameter_groups import ParameterGroups
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.topology.mesh import EXPERT, Mesh
from gptpar.topology.placement import ParameterInfo, Placement


class Layers:
    """The layers of a model on one tensor rank, in the order of the forward pass; asked by their numbers.

    Args:
        spec: the model's description.
        groups: the parameters' groups.

    Attributes:
        groups: the parameters' groups, as given.
        kinds: for every layer, the number of the first one that is equal but for its name: its cost is the same, and so
            are the groups of its parameters.
        blocks: numbers of the blocks, which can be recomputed.
    """

    def __init__(self, spec: ModelSpec, groups: ParameterGroups):
        self.spec, self.groups = spec, groups
        self._infos = {kind: _infos_of(spec.specs[kind]) for kind in dict.fromkeys(spec.kinds)}
        self.blocks = frozenset(n for n, layer in enumerate(spec.layers) if layer.role is Role.BLOCK)
        self._units: dict[tuple[int, int], Unit] = {}
        firsts: dict[tuple[int, tuple[int, ...]], int] = {}
        self.kinds = [
            firsts.setdefault((kind, tuple(param.group for param in self.unit(number, 1).params.values())), number)
            for number, kind in enumerate(spec.kinds)
        ]

    def name(self, number: int) -> str:
        """A layer's global name."""
        return self.spec.specs[number].name

    def unit(self, number: int, shards: int) -> Unit:
        """A layer's unit, equally long on all tensor ranks; that of a tied LM head is the embedding's."""
        if (number, shards) not in self._units:
            kind, name = self.spec.kinds[number], self.name(number)
            infos = {name + key.removeprefix(self.name(kind)): info for key, info in self._infos[kind].items()}
            self._units[number, shards] = Unit.of(name, infos, shards, group_of=self.groups.group_of)
        return self._units[number, shards]


def _infos_of(layer: LayerSpec) -> dict[str, ParameterInfo]:
    """A layer's parameters, as if the model had this rank's experts alone: so all are in the layer's one unit."""
    infos = Stage([layer]).infos()
    for name, info in infos.items():
        value = {axis: split for axis, split in info.placement.value.items() if axis != EXPERT}
        infos[name] = replace(info, placement=Placement(value, info.placement.gradient_sum))
    return infos


@lru_cache(maxsize=64)
def model_of(model: ModelConfig) -> ModelSpec:
    """The whole model's description; it is cached, and so are its counts."""
    return gpt_model(model)


@lru_cache(maxsize=64)
def layers_of(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    tensor: TensorAxis = ALONE,
    recomputed: frozenset[str] = frozenset(),
    mlp_tiles: int = 1,
    experts: ExpertAxis = ALL_EXPERTS,
) -> Layers:
    """The layers of a run's model.

    Args:
        optimizer: says the parameters' groups.
        tensor: a rank's place on the tensor axis, without its process group.
        recomputed: parts of layers that the backward pass computes again.
        mlp_tiles: number of tiles of tokens in which each MLP is computed.
        experts: a rank's place on the expert axis, without its process group.

    Raises:
        ConfigError: a pattern of the groups matches no parameter.
    """
    spec = gpt_model(model, tensor, recompute_modules=recomputed, mlp_tiles=mlp_tiles, experts=experts)
    return Layers(spec, ParameterGroups(optimizer, model, spec))


@lru_cache(maxsize=512)
def costs_of(layers: Layers, batch: BatchShape) -> list[Cost]:
    """Every layer's cost on one tensor rank."""
    return layers.spec.costs(batch)


@lru_cache(maxsize=512)
def table_of(
    layers: Layers, numbers: tuple[int, ...], shards: int, ratio: float, tied: tuple[tuple[str, tuple[int, ...]], ...]
) -> ParameterTable:
    """The table of the first process of a stage that runs these layers.

    Args:
        tied: (unit, the stages that have a copy of it), for units of several stages.
    """
    units = {layers.name(number): layers.unit(number, shards) for number in numbers}
    place = Place(Mesh(data=shards), 0, int(shards > 1))
    return ParameterTable([unit for unit in units.values() if unit.length], place, ratio=ratio, tied=dict(tied))
