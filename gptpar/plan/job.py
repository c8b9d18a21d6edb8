"""A configuration on a layout, with what follows from it: which layers each stage runs and how large their units are.

Nothing is allocated: layers are built on the meta device, each kind once, however deep the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import cast

import torch

from gptpar.config import Config, ModelConfig
from gptpar.config.gradients import adds_gradients
from gptpar.config.graph import wants_graph
from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.model.dtypes import DTYPES
from gptpar.model.flops import Shape, layer_flops
from gptpar.model.gpt import gpt_layers
from gptpar.model.layer_spec import LayerSpec
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.optimizers import OPTIMIZERS
from gptpar.pipeline import schedules
from gptpar.pipeline.module import LayerSplit
from gptpar.pipeline.partition import balance, partition
from gptpar.pipeline.stage import ParameterInfo, Stage
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.topology.layout import Layout

NUM_LAYERS_BEFORE_BLOCKS = 2
"""Embedding and positions."""


@dataclass(frozen=True)
class StagePart:
    """What a process of one stage runs.

    Attributes:
        blocks: number of transformer blocks in each of its chunks.
        units: number of each kind of unit it holds: embedding, positions, block, final norm, output layer.
        first: whether the embedding is looked up here.
        last: whether the loss is here.
    """

    blocks: tuple[int, ...]
    units: tuple[int, int, int, int, int]
    first: bool
    last: bool


@dataclass(frozen=True)
class Job:
    """One configuration on one layout.

    Args:
        config: resolved, with the padded vocabulary filled.
        layout: of its processes.
        device_type: ``cuda`` or ``cpu``.
    """

    config: Config
    layout: Layout
    device_type: str = "cuda"

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return cast(Shape, self.config.model)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.config.batch.micro_batch_size or 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.shape.seq_length

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in a step."""
        return (self.config.batch.global_batch_size or 1) // (self.micro_batch_size * self.layout.data)

    @property
    def num_chunks(self) -> int:
        """Pieces of the stack on each process."""
        return self.config.parallel.num_chunks

    @property
    def zero_stage(self) -> int:
        """What is sharded; nothing where a process is alone on the data axis."""
        return (self.config.parallel.zero_stage or 0) if self.layout.data > 1 else 0

    @property
    def shards(self) -> int:
        """Pieces into which the optimizer's state is cut."""
        return self.layout.data if self.zero_stage else 1

    @property
    def ratio(self) -> float:
        """The host's share of the optimizer's elements; where it is to be found out, the least."""
        return self.config.offload.ratio or 0.0

    @property
    def gradients_leave_at_once(self) -> bool:
        """Whether the CPU's gradients go to host memory when they are final (``auto`` counts as no)."""
        return self.ratio > 0 and self.config.offload.gradients_leave_at_once

    def gradient_lengths(self, part: StagePart) -> list[int]:
        """Elements of each unit of a stage whose gradient goes to the CPU, wholly or in part; the largest possible."""
        return [unit.shard_length for count, unit in zip(part.units, self.units, strict=True) if count]

    def num_offloaded_units(self, part: StagePart) -> int:
        """Units of a stage of which the CPU updates anything."""
        table = self.table(part)
        return sum(table.on_device[unit.name] < unit.shard_length for unit in table.units)

    @property
    def early_elements(self) -> float:
        """Elements whose gradient the host gets early; see :mod:`gptpar.offload.tied_embedding`."""
        offload = self.config.offload
        used = offload.offload_speculation != "off" and not offload.optimizer_nvme_path
        used = used and not self.gradients_leave_at_once
        if not self.ratio or not used or not self.config.model.tied or self.layout.world_size > 1:
            return 0.0
        embedding = self.units[0]
        return float(embedding.length - self.table(self.stages[0]).on_device[embedding.name])

    @property
    def brings_parameters(self) -> bool:
        """Whether a layer's weights are on the device only while it needs them."""
        return self.zero_stage == 3 or self.config.offload.cpu_parameters

    @property
    def token_shares(self) -> int:
        """Ranks among which the tokens between layers are shared out."""
        return self.layout.tensor if self.config.parallel.sequence_parallel else 1

    @property
    def element_size(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPES[self.config.precision.dtype].itemsize

    @property
    def optimizer(self) -> ElementwiseOptimizer:
        """Which update, and so how much state each element has."""
        return OPTIMIZERS[self.config.optimizer.optimizer]

    @property
    def wide_size(self) -> int:
        """Bytes of a master weight, a moment or a gradient that is a sum."""
        return torch.promote_types(DTYPES[self.config.precision.dtype], torch.float32).itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the gradient, as the device's optimizer reads it."""
        return self.wide_size if adds_gradients(self.config, self.layout.world_size) else self.element_size

    @property
    def offloaded_gradient_size(self) -> int:
        """Bytes of an element of a gradient on its way to the CPU: sums travel as wide as they are."""
        return self.element_size if self.num_micro_batches * self.layout.data == 1 else self.wide_size

    @property
    def masters_are_live(self) -> bool:
        """Whether forward and backward passes use the masters themselves."""
        everything_here = not self.ratio and not self.config.offload.cpu_parameters
        return self.element_size == self.wide_size and self.shards == 1 and everything_here

    @property
    def graph(self) -> bool:
        """Whether forward and backward are launched as one CUDA graph."""
        return self.device_type == "cuda" and wants_graph(self.config, self.layout.data)

    @property
    def boundary_bytes(self) -> int:
        """What travels between two stages for a micro-batch."""
        return self.tokens // self.token_shares * self.shape.hidden_size * self.element_size

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units of embedding, positions, one block, final norm and output layer."""
        return units_of(self.config.model, self._tensor, self.shards)

    @property
    def _tensor(self) -> TensorAxis:
        """The first rank's place on the tensor axis, without its group."""
        return TensorAxis(self.layout.tensor, sequence_parallel=self.token_shares > 1)

    def table(self, part: StagePart) -> ParameterTable:
        """The parameters of a stage's first process, as the run itself lays them out; blocks are numbered from 0."""
        return self._tables[part]

    @cached_property
    def _tables(self) -> dict[StagePart, ParameterTable]:
        model, tensor = self.config.model, self._tensor
        parts = dict.fromkeys(self.stages)
        return {part: table_of(model, tensor, self.shards, self.ratio, part.units, part.first) for part in parts}

    @property
    def split(self) -> LayerSplit:
        """Which layers go to which stage, as the run itself cuts them."""
        method = self.config.parallel.pipeline_partition_method
        return split_of_model(self.config.model, self.layout.pipeline, self.num_chunks, method)

    @property
    def stages(self) -> tuple[StagePart, ...]:
        """What each stage runs."""
        method = self.config.parallel.pipeline_partition_method
        return stages_of_model(self.config.model, self.layout.pipeline, self.num_chunks, method)


@lru_cache(maxsize=64)
def _infos(model: ModelConfig, tensor: TensorAxis) -> dict[str, dict[str, ParameterInfo]]:
    """What is known of the parameters of each kind of layer: embedding, positions, block, final norm, output layer."""
    specs = gpt_layers(model, tensor)
    kinds = [specs[i] for i in (0, 1, NUM_LAYERS_BEFORE_BLOCKS, -2, -1)]
    names = [spec.name for spec in kinds[:-1]] + ["output"]  # the last one may be tied to the first one
    return {name: Stage([spec]).infos() for name, spec in zip(names, kinds, strict=True)}


@lru_cache(maxsize=512)
def units_of(model: ModelConfig, tensor: TensorAxis, shards: int) -> tuple[Unit, ...]:
    """The units of each kind of layer; they are equally long on all tensor ranks."""
    return tuple(Unit.of(name, infos, shards) for name, infos in _infos(model, tensor).items())


@lru_cache(maxsize=1 << 13)
def _block(model: ModelConfig, tensor: TensorAxis, shards: int, number: int) -> Unit:
    """One block's unit; all blocks are alike."""
    name = f"layers.{number}"
    infos = _infos(model, tensor)["layers.0"]
    return Unit.of(name, {name + key.removeprefix("layers.0"): info for key, info in infos.items()}, shards)


@lru_cache(maxsize=512)
def table_of(
    model: ModelConfig,
    tensor: TensorAxis,
    shards: int,
    ratio: float,
    counts: tuple[int, int, int, int, int],
    first: bool,
) -> ParameterTable:
    """The table of the first process of a stage with so many units of each kind (see :class:`StagePart`)."""
    embedding, positions, block, norm, output = (
        [unit] * count for unit, count in zip(units_of(model, tensor, shards), counts, strict=True)
    )
    blocks = [_block(model, tensor, shards, number) for number in range(len(block))]
    inner = [*positions, *blocks, *norm, *output]
    # A stage that does not look tokens up has the tied embedding as its output layer.
    units = [*embedding, *inner] if first else [*inner, *embedding]
    return ParameterTable([unit for unit in units if unit.length], Place(shards), ratio=ratio)


@lru_cache(maxsize=512)
def split_of_model(model: ModelConfig, num_stages: int, num_chunks: int, method: str) -> LayerSplit:
    """As :func:`~gptpar.pipeline.module.split_layers`, with each kind of layer built once.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    specs: list[LayerSpec] = gpt_layers(model)
    sizes = [sum(info.shape.numel() for info in infos.values()) for infos in _infos(model, ALONE).values()]
    num_blocks = len(specs) - 4
    parameters = [*sizes[:2], *[sizes[2]] * num_blocks, *sizes[3:]]
    flops = layer_flops(cast(Shape, model))
    bounds = partition(
        method,
        num_stages * num_chunks,
        parameters=parameters,
        flops=flops,
        kinds=[spec.cls.__name__ for spec in specs],
        num_stages=num_stages,
    )
    return LayerSplit(bounds, balance(parameters, bounds, num_stages), balance(flops, bounds, num_stages))


@lru_cache(maxsize=512)
def stages_of_model(model: ModelConfig, num_stages: int, num_chunks: int, method: str) -> tuple[StagePart, ...]:
    """What each stage of a cut model runs.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    bounds = split_of_model(model, num_stages, num_chunks, method).bounds
    parts = list(pairwise(bounds))
    return tuple(_stage(parts[stage::num_stages], bounds[-1] - 1, model.tied) for stage in range(num_stages))


def _stage(parts: Sequence[tuple[int, int]], last: int, tied: bool) -> StagePart:
    """A stage from the (first layer, last + 1) of its parts and the number of the output layer."""
    low, high = NUM_LAYERS_BEFORE_BLOCKS, last - 1
    blocks = tuple(max(0, min(stop, high) - max(start, low)) for start, stop in parts)

    def has(layer: int) -> bool:
        return any(start <= layer < stop for start, stop in parts)

    embedding, output = has(0) or (tied and has(last)), has(last) and not tied
    units = (int(embedding), int(has(1)), sum(blocks), int(has(high)), int(output))
    return StagePart(blocks, units, has(0), has(last))


@lru_cache(maxsize=4096)
def alive(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> frozenset[tuple[int, ...]]:
    """How many micro-batches each chunk of a stage holds, in all the combinations after which one is given up.

    Counted along the schedule. Beyond a few rounds of the stages it only repeats itself, so more are not counted.
    """
    rounds = min(num_micro_batches, 3 * num_stages + num_micro_batches % num_stages)
    counts = [0] * num_chunks
    found = set()
    grew = False
    for action in schedules.interleaved(stage, num_stages, rounds, num_chunks):
        grows = isinstance(action, schedules.Forward)
        if grew and not grows:
            found.add(tuple(counts))
        counts[action.chunk] += 1 if grows else -1
        grew = grows
    return frozenset(found)
