"""``Job``: the layers of each stage, their costs and their units, from a configuration on a layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import torch

from gptpar.config import Config, ModelConfig, RecomputeConfig
from gptpar.config.sections.parallel import groups_gathered
from gptpar.config.sections.precision import wants_graph
from gptpar.engine.ranges import Home, Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.model.dtypes import DTYPES
from gptpar.model.experts.dispatch import ExpertAxis
from gptpar.offload.buckets import StateSize
from gptpar.optim.update import Update
from gptpar.pipeline import schedules
from gptpar.pipeline.host_activations import offloaded_blocks
from gptpar.pipeline.layer_split import LayerSplit, split_model
from gptpar.pipeline.recompute import recompute_groups
from gptpar.plan.layers import Layers, costs_of, layers_of, model_of, table_of
from gptpar.plan.states import state_bytes
from gptpar.tensor_parallel import TensorAxis
from gptpar.tensor_parallel.cost import BatchShape, Cost
from gptpar.topology.mesh import COPIES, EXPERT, Mesh, copies_over

Ties = tuple[tuple[str, tuple[int, ...]], ...]
"""(layer, the stages that have a copy of it), for layers of several stages."""
Groups = Sequence[Sequence[tuple[int, ...]]]
"""Groups of blocks, by number, that are recomputed together, for each virtual stage of a stage."""
BUFFERS_OF_GATHERED = 4
"""Buffers in attention's backward pass: gathered keys and values, their gradients, the sum, its copy to send."""


@dataclass(frozen=True)
class StagePart:
    """The layers that a process of one stage runs; two are equal if their layers are, but for the names.

    Attributes:
        kinds: for each virtual stage, the kinds of its layers (:class:`~gptpar.plan.layers.Layers`); ``~kind`` for a
            layer that saves its activations in host memory.
        virtual_stages: for each virtual stage, the numbers of its layers in the model.
    """

    kinds: tuple[tuple[int, ...], ...]
    virtual_stages: tuple[tuple[int, ...], ...] = field(compare=False)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of all its layers, in the order of the forward pass."""
        return tuple(chain(*self.virtual_stages))


@dataclass(frozen=True)
class Job:
    """One configuration on one layout.

    Args:
        config: resolved, with the padded vocabulary filled.
        mesh: layout of its processes.
        device_type: ``cuda`` or ``cpu``.
        document_lengths: lengths of typical documents, whose tokens do not see other documents (see
            :class:`~gptpar.tensor_parallel.cost.BatchShape`); ``None``: they are not known, and samples count as whole.
    """

    config: Config
    mesh: Mesh
    device_type: str = "cuda"
    document_lengths: tuple[int, ...] | None = None

    @property
    def shape(self) -> ModelConfig:
        """The model's shape."""
        return self.config.model

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.config.batch.micro_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one process."""
        return self.micro_batch_size * self.shape.seq_length // self.mesh.context

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in a step."""
        return self.config.batch.global_batch_size // (self.micro_batch_size * self.mesh.data)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of each process."""
        return self.config.parallel.num_virtual_stages

    @cached_property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 where a process has the only copy of its weights."""
        return self.config.parallel.zero_stage if self.num_copies > 1 else 0

    @property
    def num_copies(self) -> int:
        """Number of processes that hold the same weights and read different tokens."""
        return self.mesh.size(*COPIES)

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer's state.

        Where the expert axis divides the data axis, this is the number of shards of a rank's experts. Other parameters,
        few beside experts, have more shards, and are counted with too much memory.
        """
        return Place(self.mesh, zero_stage=self.zero_stage).shards(copies_over((EXPERT,)))

    @cached_property
    def ratio(self) -> float:
        """Fraction of the optimizer's elements that the CPU updates; with ``auto``, the smallest possible one."""
        return self.config.offload.least_ratio

    @property
    def gradients_leave_at_once(self) -> bool:
        """Whether offloaded gradients are copied to the host once they are final (``auto`` counts as no)."""
        return self.ratio > 0 and self.config.offload.gradients_leave_at_once

    @property
    def host_sums(self) -> float:
        """Share of units whose gradients the host adds up; see :mod:`gptpar.offload.host_sums`."""
        return self.config.batch.adds_gradients(self.mesh.world_size) * self.config.offload.summed_ratio

    def gradient_lengths(self, part: StagePart) -> list[int]:
        """Number of elements, for each of a stage's layers, whose gradients can go to the CPU at most."""
        return [self.unit(number).shard_length for number in part.layers]

    def num_offloaded_units(self, part: StagePart) -> int:
        """Number of a stage's units with elements that the CPU updates."""
        table = self.table(part)
        return sum(table.on_device[unit.name] < unit.shard_length for unit in table.units)

    @cached_property
    def early_elements(self) -> float:
        """Number of elements whose partial gradient the CPU gets early; see :mod:`gptpar.offload.tied_embedding`."""
        offload, shared = self.config.offload, self.layers.spec.shared
        used = offload.offload_speculation != "off" and not offload.optimizer_nvme_path
        used = used and not self.gradients_leave_at_once
        if not self.ratio or not used or shared is None or self.mesh.world_size > 1:
            return 0.0
        table = self.table(self.stages[0])
        (length,) = (unit.length for unit in table.units if unit.name == shared)
        return float(length - table.on_device[shared])

    @property
    def token_splits(self) -> int:
        """Number of tensor ranks that divide the tokens between layers; 1 without sequence parallelism."""
        return self.mesh.tensor if self.config.parallel.sequence_parallel else 1

    @cached_property
    def element_size(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPES[self.config.precision.dtype].itemsize

    @cached_property
    def wide_size(self) -> int:
        """Bytes of a master weight, a moment or a gradient that is a sum."""
        return torch.promote_types(DTYPES[self.config.precision.dtype], torch.float32).itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the gradient, as the device's optimizer reads it."""
        return self.wide_size if self.config.batch.adds_gradients(self.mesh.world_size) else self.element_size

    @property
    def offloaded_gradient_size(self) -> int:
        """Bytes of an element of a gradient that is copied to the CPU; sums are copied in their wide format."""
        is_sum = self.num_copies > 1 or (self.num_micro_batches > 1 and not self.host_sums)
        if is_sum and self.host_sums and self.config.parallel.grad_reduce_in_bf16:
            return 2
        return self.wide_size if is_sum else self.element_size

    @property
    def masters_are_parameters(self) -> bool:
        """Whether the model parameters are the master weights themselves."""
        everything_here = not self.ratio and not self.config.offload.cpu_parameters
        return self.element_size == self.wide_size and self.shards == 1 and everything_here

    @cached_property
    def graph(self) -> bool:
        """Whether forward and backward are launched as one CUDA graph."""
        return self.device_type == "cuda" and wants_graph(self.config, self.num_copies)

    @cached_property
    def boundary_bytes(self) -> int:
        """Bytes that are sent from one stage to the next for a micro-batch."""
        return self.tokens // self.token_splits * self.shape.hidden_size * self.element_size

    @property
    def recomputed_input_bytes(self) -> float:
        """Bytes that a process keeps of the input of a group of recomputed blocks, on the device or on the host."""
        splits = self.config.recompute.distribute_saved_activations and self.token_splits == 1
        return self.boundary_bytes / (self.mesh.tensor if splits else 1)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return model_of(self.config.model).num_parameters

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token is computed with."""
        return model_of(self.config.model).num_active_parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token's forward and backward pass, attention counted over its causal half."""
        return model_of(self.config.model).flops_per_token(causal=True, document_lengths=self.document_lengths)

    @cached_property
    def layers(self) -> Layers:
        """The layers on one tensor rank, of whose units the data axis has ``shards``."""
        config, tensor = self.config, TensorAxis(self.mesh.tensor, sequence_parallel=self.token_splits > 1)
        modules, tiles = frozenset(config.recompute.recompute_modules), config.recompute.mlp_chunks_for_training
        return layers_of(config.model, config.optimizer, tensor, modules, tiles, ExpertAxis(self.mesh.expert))

    @cached_property
    def costs(self) -> list[Cost]:
        """Every layer's cost on one tensor rank, for each token of a micro-batch."""
        dtype, length = DTYPES[self.config.precision.dtype], self.shape.seq_length
        gathers = self.mesh.context > 1 and self.config.parallel.cp_comm_type == "allgather"
        # Gathered keys always take the kernel of variable length.
        documents: tuple[int, ...] | None = (length,) if gathers else None
        if self.config.data.reset_attention_mask:
            documents = self.document_lengths or (length,)
        rows, recorded = 1 if gathers else self.mesh.context, self.config.precision.cuda_graph == "on"
        shape = BatchShape(self.tokens, length, dtype, self.device_type, documents, rows, recorded)
        return [self._over_context(cost) if cost.attention else cost for cost in costs_of(self.layers, shape)]

    def _over_context(self, cost: Cost) -> Cost:
        """An attention layer's cost, with what it computes, keeps and moves of other context ranks' tokens."""
        size, parallel = self.mesh.context, self.config.parallel
        if size == 1:
            return cost
        groups, heads = (n // self.mesh.tensor for n in (self.shape.num_query_groups, self.shape.num_attention_heads))
        of_head = self.shape.kv_channels * self.element_size
        if parallel.cp_comm_type == "a2a":
            more = 2.0 * (math.lcm(groups, size) - groups) * of_head  # copied keys and values
        else:
            at_once = groups_gathered(groups, 2 * of_head * self.tokens * size)
            moved = BUFFERS_OF_GATHERED * 2 * at_once * of_head * size
            cost, more = replace(cost, workspace=cost.workspace + moved), 0.0
            if self.config.model.attention_dropout:  # of all tokens' queries
                again, more = (cost.attention + cost.masked) * (size - 1), 2.0 * heads * of_head * (size - 1)
                cost = replace(cost, masked=cost.masked + again)
        return cost if "core_attn" in self.config.recompute.recompute_modules else replace(cost, kept=cost.kept + more)

    @property
    def updates(self) -> tuple[Update, ...]:
        """The updates of the parameters' groups, which say how much state each element has."""
        return self.layers.groups.updates

    def device_state_bytes(self, part: StagePart) -> int:
        """Bytes of the master weights and optimizer states that a stage's process keeps on its device."""
        return _device_state_bytes(self.table(part), self.updates, self.wide_size)

    def host_state(self, part: StagePart) -> StateSize:
        """The master weights and optimizer states of a stage's process in host memory."""
        return StateSize.of(self.table(part).offloaded(), self.updates, self.wide_size)

    def unit(self, number: int) -> Unit:
        """A layer's unit."""
        return self.layers.unit(number, self.shards)

    def kept(self, number: int) -> float:
        """Bytes that a layer keeps of a micro-batch, if it is not recomputed as a whole."""
        return self.tokens * self.costs[number].kept

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The blocks, by number, that save their activations in host memory."""
        count = self.config.recompute.cpu_offloading_num_layers
        return offloaded_blocks(sorted(self.layers.blocks), count) if count else frozenset()

    def bytes_to_host(self, part: StagePart) -> list[float]:
        """Bytes of a micro-batch's activations that the host keeps, for each of a stage's virtual stages."""
        if not self.offloaded and not self.config.recompute.checkpoint_in_cpu:
            return [0.0] * len(part.virtual_stages)
        if not self.offloaded:
            return [self.recomputed_input_bytes * len(groups) for groups in self.recomputed(part)]
        return [sum(self.kept(number) for number in one if number in self.offloaded) for one in part.virtual_stages]

    def blocks(self, part: StagePart) -> list[int]:
        """A stage's blocks, by number."""
        return [number for number in part.layers if number in self.layers.blocks]

    def head(self, part: StagePart) -> int | None:
        """The stage's layer that forms its gradients in the forward pass; ``None``: another stage has it."""
        costs = self.costs
        return next((number for number in reversed(part.layers) if costs[number].chunks), None)

    def recomputed(self, part: StagePart) -> Groups:
        """The groups of a stage's blocks that are recomputed together."""
        return _recomputed(self.layers, part.virtual_stages, self.config.recompute)

    def table(self, part: StagePart) -> ParameterTable:
        """The parameters of the first process of the first such stage, as the run itself lays them out."""
        return self._tables[part]

    @cached_property
    def _tables(self) -> dict[StagePart, ParameterTable]:
        stages, tied = self._parts
        return {part: table_of(self.layers, part.layers, self.shards, self.ratio, tied) for part in set(stages)}

    @property
    def split(self) -> LayerSplit:
        """The assignment of layers to stages, as in the run itself."""
        method = self.config.parallel.pipeline_partition_method
        return split_of_model(self.config.model, self.mesh.pipeline, self.num_virtual_stages, method)

    @property
    def stages(self) -> tuple[StagePart, ...]:
        """The layers that each stage runs; equal parts are one, with the numbers of the first."""
        return self._parts[0]

    @cached_property
    def _parts(self) -> tuple[tuple[StagePart, ...], Ties]:
        method = self.config.parallel.pipeline_partition_method
        sizes = self.mesh.pipeline, self.num_virtual_stages
        return parts_of(self.layers, self.shape, *sizes, method, self.offloaded)


@lru_cache(maxsize=4096)
def _recomputed(layers: Layers, virtual_stages: tuple[tuple[int, ...], ...], recompute: RecomputeConfig) -> Groups:
    blocks = ({layers.name(number): number for number in one if number in layers.blocks} for one in virtual_stages)
    return [
        [tuple(named[name] for name in group) for group in recompute_groups(recompute, list(named))] for named in blocks
    ]


@lru_cache(maxsize=512)
def _device_state_bytes(table: ParameterTable, updates: tuple[Update, ...], size: int) -> int:
    return state_bytes(table.device_group_ranges(), updates, table.length(Home.DEVICE), size)


@lru_cache(maxsize=512)
def split_of_model(model: ModelConfig, num_stages: int, num_virtual_stages: int, method: str) -> LayerSplit:
    """The assignment of a model's layers to stages, as :func:`~gptpar.pipeline.layer_split.split_model` makes it.

    Raises:
        ConfigError: the model cannot be divided like that.
    """
    return split_model(model_of(model), num_stages, num_virtual_stages, method)


@lru_cache(maxsize=512)
def parts_of(
    layers: Layers, model: ModelConfig, num_stages: int, num_virtual_stages: int, method: str, offloaded: frozenset[int]
) -> tuple[tuple[StagePart, ...], Ties]:
    """(the layers that each stage runs, the layers that several stages have)."""
    split = split_of_model(model, num_stages, num_virtual_stages, method)
    pieces = [tuple(range(start, stop)) for start, stop in pairwise(split.bounds)]
    kinds = [~kind if number in offloaded else kind for number, kind in enumerate(layers.kinds)]
    parts: dict[StagePart, StagePart] = {}
    stages = []
    for stage in range(num_stages):
        virtual_stages = tuple(pieces[stage::num_stages])
        part = StagePart(tuple(tuple(kinds[number] for number in one) for one in virtual_stages), virtual_stages)
        stages.append(parts.setdefault(part, part))
    return tuple(stages), tuple(split.tied_stages(layers.spec.specs).items())


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
