"""``Job``: the layers of each stage and the sizes of their units, from a configuration on a layout.

Nothing is allocated: layers are built on the meta device, and one layer of each kind is enough for any depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from gptpar.config import Config, ModelConfig
from gptpar.config.roles import Role, layer_roles
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.model.dtypes import DTYPES
from gptpar.model.gpt import gpt_model
from gptpar.model.spec import ModelLayer, ModelSpec
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.optimizers import OPTIMIZERS
from gptpar.pipeline import schedules
from gptpar.pipeline.module import LayerSplit, split_model
from gptpar.pipeline.stage import Stage
from gptpar.plan.graph import wants_graph
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import ParameterInfo


@dataclass(frozen=True)
class StagePart:
    """The layers that a process of one stage runs.

    Attributes:
        blocks: number of transformer blocks in each of its virtual stages.
        units: (role, number) of its layers with parameters of their own, in the order of the forward pass.
        first: whether it has the embedding.
        last: whether it has the LM head and the loss.
    """

    blocks: tuple[int, ...]
    units: tuple[tuple[Role, int], ...]
    first: bool
    last: bool

    def has(self, role: Role) -> bool:
        """Whether the stage has a layer of this role with parameters of its own."""
        return any(held is role for held, _ in self.units)


@dataclass(frozen=True)
class Job:
    """One configuration on one layout.

    Args:
        config: resolved, with the padded vocabulary filled.
        layout: of its processes.
        device_type: ``cuda`` or ``cpu``.
    """

    config: Config
    layout: Mesh
    device_type: str = "cuda"

    @property
    def shape(self) -> ModelConfig:
        """The model's shape."""
        return self.config.model

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.config.batch.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.shape.seq_length

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in a step."""
        return self.config.batch.global_batch_size // (self.micro_batch_size * self.layout.data)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of each process."""
        return self.config.parallel.num_virtual_stages

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 where a process is alone on the data axis."""
        return self.config.parallel.zero_stage if self.layout.data > 1 else 0

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer's state."""
        return self.layout.data if self.zero_stage else 1

    @property
    def ratio(self) -> float:
        """Fraction of the optimizer's elements that the CPU updates; with ``auto``, the smallest possible one."""
        return self.config.offload.least_ratio

    @property
    def gradients_leave_at_once(self) -> bool:
        """Whether offloaded gradients are copied to the host once they are final (``auto`` counts as no)."""
        return self.ratio > 0 and self.config.offload.gradients_leave_at_once

    def gradient_lengths(self, part: StagePart) -> list[int]:
        """For each role among a stage's units: the most elements of a unit whose gradients can go to the CPU."""
        return [self.units[role].shard_length for role, _ in part.units]

    def num_offloaded_units(self, part: StagePart) -> int:
        """Number of a stage's units with elements that the CPU updates."""
        table = self.table(part)
        return sum(table.on_device[unit.name] < unit.shard_length for unit in table.units)

    @property
    def early_elements(self) -> float:
        """Number of elements whose partial gradient the CPU gets early; see :mod:`gptpar.offload.tied_embedding`."""
        offload = self.config.offload
        used = offload.offload_speculation != "off" and not offload.optimizer_nvme_path
        used = used and not self.gradients_leave_at_once
        if not self.ratio or not used or not self.config.model.tied or self.layout.world_size > 1:
            return 0.0
        embedding = self.units[Role.EMBEDDING]
        return float(embedding.length - self.table(self.stages[0]).on_device[embedding.name])

    @property
    def brings_parameters(self) -> bool:
        """Whether a layer's weights are on the device only while it needs them."""
        return self.zero_stage == 3 or self.config.offload.cpu_parameters

    @property
    def token_splits(self) -> int:
        """Number of tensor ranks that divide the tokens between layers; 1 without sequence parallelism."""
        return self.layout.tensor if self.config.parallel.sequence_parallel else 1

    @property
    def element_size(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPES[self.config.precision.dtype].itemsize

    @property
    def optimizer(self) -> ElementwiseOptimizer:
        """The optimizer, which says how much state each element has."""
        return OPTIMIZERS[self.config.optimizer.optimizer]

    @property
    def wide_size(self) -> int:
        """Bytes of a master weight, a moment or a gradient that is a sum."""
        return torch.promote_types(DTYPES[self.config.precision.dtype], torch.float32).itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the gradient, as the device's optimizer reads it."""
        return self.wide_size if self.config.batch.adds_gradients(self.layout.world_size) else self.element_size

    @property
    def offloaded_gradient_size(self) -> int:
        """Bytes of an element of a gradient that is copied to the CPU; sums are copied in their wide format."""
        return self.element_size if self.num_micro_batches * self.layout.data == 1 else self.wide_size

    @property
    def masters_are_live(self) -> bool:
        """Whether forward and backward passes use the master weights themselves."""
        everything_here = not self.ratio and not self.config.offload.cpu_parameters
        return self.element_size == self.wide_size and self.shards == 1 and everything_here

    @property
    def graph(self) -> bool:
        """Whether forward and backward are launched as one CUDA graph."""
        return self.device_type == "cuda" and wants_graph(self.config, self.layout.data)

    @property
    def boundary_bytes(self) -> int:
        """Bytes that are sent from one stage to the next for a micro-batch."""
        return self.tokens // self.token_splits * self.shape.hidden_size * self.element_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return model_of(self.config.model, ALONE).num_parameters

    @cached_property
    def units(self) -> Mapping[Role, Unit]:
        """Role -> its unit. All blocks have equal units; the unit of a tied LM head is the embedding's."""
        return units_of(self.config.model, self._tensor, self.shards)

    def block_names(self, part: StagePart) -> tuple[str, ...]:
        """Names of a stage's blocks in its :meth:`table`, which numbers them from 0."""
        return model_of(self.config.model, self._tensor).names(Role.BLOCK)[: sum(part.blocks)]

    @property
    def _tensor(self) -> TensorAxis:
        """The first rank's place on the tensor axis, without its group."""
        return TensorAxis(self.layout.tensor, sequence_parallel=self.token_splits > 1)

    def table(self, part: StagePart) -> ParameterTable:
        """The parameters of a stage's first process, as the run itself lays them out; blocks are numbered from 0."""
        return self._tables[part]

    @cached_property
    def _tables(self) -> dict[StagePart, ParameterTable]:
        model, tensor = self.config.model, self._tensor
        tied = tuple(self.split.tied_stages(model_of(model, ALONE).specs).items())
        parts = dict.fromkeys(self.stages)
        return {part: table_of(model, tensor, self.shards, self.ratio, part.units, tied) for part in parts}

    @property
    def split(self) -> LayerSplit:
        """The assignment of layers to stages, as in the run itself."""
        method = self.config.parallel.pipeline_partition_method
        return split_of_model(self.config.model, self.layout.pipeline, self.num_virtual_stages, method)

    @cached_property
    def stages(self) -> tuple[StagePart, ...]:
        """The layers that each stage runs."""
        method = self.config.parallel.pipeline_partition_method
        return stages_of_model(self.config.model, self.layout.pipeline, self.num_virtual_stages, method)


@lru_cache(maxsize=64)
def model_of(model: ModelConfig, tensor: TensorAxis) -> ModelSpec:
    """The model's description; it is cached, and so are its counts."""
    return gpt_model(model, tensor)


@lru_cache(maxsize=64)
def _infos(model: ModelConfig, tensor: TensorAxis) -> dict[Role, dict[str, ParameterInfo]]:
    """Role -> global name -> description of the parameter, for the first layer with each role."""
    described = model_of(model, tensor)
    return {role: Stage([described.first(role)]).infos() for role in layer_roles(1)}


@lru_cache(maxsize=512)
def units_of(model: ModelConfig, tensor: TensorAxis, shards: int) -> Mapping[Role, Unit]:
    """The unit of the first layer with each role; units are equally long on all tensor ranks."""
    described = model_of(model, tensor)
    return {role: Unit.of(described.first(role).name, infos, shards) for role, infos in _infos(model, tensor).items()}


@lru_cache(maxsize=1 << 13)
def _block(model: ModelConfig, tensor: TensorAxis, shards: int, number: int) -> Unit:
    """One block's unit; all blocks are alike."""
    names, infos = model_of(model, tensor).names(Role.BLOCK), _infos(model, tensor)[Role.BLOCK]
    renamed = {names[number] + key.removeprefix(names[0]): info for key, info in infos.items()}
    return Unit.of(names[number], renamed, shards)


@lru_cache(maxsize=512)
def table_of(
    model: ModelConfig,
    tensor: TensorAxis,
    shards: int,
    ratio: float,
    held: tuple[tuple[Role, int], ...],
    tied: tuple[tuple[str, tuple[int, ...]], ...],
) -> ParameterTable:
    """The table of the first process of a stage that holds these units (see :class:`StagePart`).

    Args:
        tied: (unit, the stages that have a copy of it), for units of several stages.
    """
    units: list[Unit] = []
    for role, count in held:
        if role is Role.BLOCK:
            units += [_block(model, tensor, shards, number) for number in range(count)]
        else:
            units.append(units_of(model, tensor, shards)[role])
    return ParameterTable(
        [unit for unit in units if unit.length],
        Place(Mesh(data=shards), 0, int(shards > 1)),
        ratio=ratio,
        tied=dict(tied),
    )


@lru_cache(maxsize=512)
def split_of_model(model: ModelConfig, num_stages: int, num_virtual_stages: int, method: str) -> LayerSplit:
    """As :func:`~gptpar.pipeline.module.split_model`."""
    return split_model(model_of(model, ALONE), num_stages, num_virtual_stages, method)


@lru_cache(maxsize=512)
def stages_of_model(model: ModelConfig, num_stages: int, num_virtual_stages: int, method: str) -> tuple[StagePart, ...]:
    """The layers that each stage of a model runs.

    Raises:
        ConfigError: the model cannot be divided like that.
    """
    layers = model_of(model, ALONE).layers
    chunks = [layers[a:b] for a, b in pairwise(split_of_model(model, num_stages, num_virtual_stages, method).bounds)]
    return tuple(_stage(chunks[stage::num_stages]) for stage in range(num_stages))


def _stage(chunks: Sequence[Sequence[ModelLayer]]) -> StagePart:
    """A stage from the layers of its virtual stages."""
    roles = [[layer.role for layer in chunk] for chunk in chunks]
    first_use: dict[str, Role] = {}  # of parameters: a tied LM head on the embedding's stage has none of its own
    for layer in (layer for chunk in chunks for layer in chunk):
        first_use.setdefault(layer.spec.name, layer.role)
    return StagePart(
        blocks=tuple(chunk.count(Role.BLOCK) for chunk in roles),
        units=tuple(Counter(first_use.values()).items()),
        first=any(Role.EMBEDDING in chunk for chunk in roles),
        last=any(Role.LM_HEAD in chunk for chunk in roles),
    )


@lru_cache(maxsize=4096)
def alive(stage: int, num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> frozenset[tuple[int, ...]]:
    """Numbers of micro-batches whose activations each virtual stage of a stage holds, at every peak of the schedule.

    A peak is where a backward pass follows a forward pass. After a few rounds of the stages the schedule only repeats
    itself, so that later rounds are not counted.
    """
    rounds = min(num_micro_batches, 3 * num_stages + num_micro_batches % num_stages)
    counts = [0] * num_virtual_stages
    found = set()
    grew = False
    for action in schedules.interleaved(stage, num_stages, rounds, num_virtual_stages):
        grows = isinstance(action, schedules.Forward)
        if grew and not grows:
            found.add(tuple(counts))
        counts[action.virtual_stage] += 1 if grows else -1
        grew = grows
    return frozenset(found)
