"""``Engine``: training steps of a pipeline of layers over sharded parameters, gradients and optimizer state.

``PipelinePasses`` runs the passes of a step by a schedule, and reports them to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from gptpar.engine.collector import GradientCollector
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.fused_sums import FusedSums, GradientPlaces
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.matrix_step import MatrixExchange
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.ranges import Home, Place
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import GroupOf, Unit, group_by_decay
from gptpar.optim.group_ranges import GPT_FAMILIES, Family
from gptpar.optim.update import Hyperparameters, Update
from gptpar.pipeline.runtime import MicroBatch, Observer, Pipeline
from gptpar.pipeline.stage import memory_for
from gptpar.tensor_parallel.layers import SplitLinear


class EngineStage(Protocol):
    """Layers that this process calls one after the other: a pipeline's virtual stage, or a whole module."""

    def call_through(self, gatherer: ParameterGatherer) -> None:
        """Have the gatherer call the layers: it acquires each layer's parameters first."""

    def call_order(self) -> list[str]:
        """Layers' names in the order of the forward pass, as far as it is known."""

    def units_by_layer(self) -> dict[str, tuple[str, ...]]:
        """Layer's name -> the units that hold its parameters."""

    def lookups(self) -> Collection[str]:
        """Layers whose backward pass reads none of their parameters, as far as they are known."""

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Global name -> parameter, for all parameters that get gradients."""

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter, and every buffer without storage, to its memory in ``storage``, by global name."""


def table_of(
    pipeline: Pipeline,
    place: Place,
    ratio: float,
    group_of: GroupOf = group_by_decay,
) -> ParameterTable:
    """The table of this process's parameters.

    Args:
        pipeline: the layers of this process.
        place: the process's position on the mesh.
        ratio: the twin-flow ratio: which fraction of the elements the host updates, 0 to 1.
        group_of: says each parameter's optimizer group.
    """
    stages = pipeline.stages_here
    return ParameterTable.of(
        {unit: infos for stage in stages for unit, infos in stage.infos_by_unit().items()},
        place,
        ratio=ratio,
        group_of=group_of,
        tied=pipeline.by_unit(pipeline.tied_stages),
        buffers={name: info for stage in stages for name, info in stage.buffer_infos().items()},
    )


@dataclass(frozen=True)
class EngineSettings:
    """The engine's number formats, and what it does beside the update.

    Attributes:
        dtype: of the model's parameters, and of the gradients that autograd produces.
        reduce_dtype: number format in which processes exchange gradients.
        adds_gradients: whether a step's gradient is a sum over micro-batches or processes; sums are kept wide.
        records_steps: whether steps are recorded as graphs.
        counts_zeros: whether zeros in gradients are counted.
        host_sums: the share of units whose gradients the subscriber adds up over micro-batches.
        fuses_sums: whether linear layers add their weights' gradients to sums over micro-batches.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    adds_gradients: bool = True
    records_steps: bool = False
    counts_zeros: bool = False
    host_sums: float = 0.0
    fuses_sums: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The number format of master weights, optimizer state and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def matrix_dtype(self, device: torch.device) -> torch.dtype:
        """The number format in which matrices are exchanged and orthogonalized: bf16 for 16-bit models on GPUs."""
        return torch.bfloat16 if self.dtype.itemsize == 2 and device.type == "cuda" else self.wide

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The number format of the gradients that the optimizer reads."""
        return self.wide if self.adds_gradients else self.dtype


class Engine:
    """Runs steps over the memory of a model's parameters.

    The device's optimizer updates the device's elements, and a subscriber the others. Gatherer, collector and reducer
    move values during a step.

    Args:
        stages: the layers of this process, without storage.
        table: of their parameters.
        parameters: the memory of the model's parameters.
        updates: by parameter group; the subscriber's are the same.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        device: where layers compute.
        subscriber: updates the elements that are not the device's; ``None``: nobody does.
        tied: units that other stages have, too, with the group that sums their gradients.
        frozen: units without gradients, which are not in the table.
        counts_arrivals: see :class:`~gptpar.engine.collector.GradientCollector`.
        families: of the parameter groups (:class:`MasterOptimizer`).
        linears: global name of a weight -> the layer that can form its gradient in the gradient sum.

    Attributes:
        stages, table, parameters, settings, device, subscriber: as given.
        optimizer: of the device's elements, through which the subscriber gets its steps, too.
        gatherer: gathers parameters before layers are called.
        gradients: collects them, and has their memory and their reducer.
        graph_breaks: where the host acts between the launches of a step.
        masters_are_parameters: whether the model's parameters have the memory of the master weights.
    """

    def __init__(
        self,
        stages: Sequence[EngineStage],
        table: ParameterTable,
        parameters: ParameterMemory,
        data: DataAxes,
        settings: EngineSettings,
        updates: Sequence[Update],
        clip_grad: float,
        device: torch.device,
        subscriber: Subscriber | None = None,
        *,
        tied: Mapping[str, dist.ProcessGroup] | None = None,
        frozen: Sequence[Unit] = (),
        counts_arrivals: bool = False,
        families: Sequence[Family] = GPT_FAMILIES,
        linears: Mapping[str, SplitLinear] | None = None,
    ):
        # The order follows who needs whom. The optimizer reads the gradients' memory. The collector calls the reducer,
        # and tells the gatherer, which frees a layer's parameters after its backward pass. Layers get their memory and
        # their hooks last, when everyone whom the hooks call is there.
        self.stages, self.table, self.parameters, self.device = list(stages), table, parameters, device
        self.settings, self.subscriber, self.graph_breaks = settings, subscriber, GraphBreaks()
        memory = GradientMemory(
            table,
            data,
            settings.gradient_dtype,
            device,
            arriving_dtype=settings.dtype,
            ahead=settings.records_steps,
            host_sums=settings.host_sums,
        )
        self.masters_are_parameters = _masters_are_parameters(table, parameters, settings.wide)
        self._copies_each_step = parameters.on_host
        written = {unit: parameters.shards[unit][:length] for unit, length in table.on_device.items()}
        self.optimizer = MasterOptimizer(
            updates,
            table,
            memory.shard,
            clip_grad,
            subscriber,
            families=families,
            master=parameters.everything if self.masters_are_parameters else None,
            parameters=None if self.masters_are_parameters or parameters.on_host else written,
            exchange=MatrixExchange(data.groups, settings.matrix_dtype(device)),
        )
        layers = {name: units for stage in self.stages for name, units in stage.units_by_layer().items()}
        orders = _call_orders(self.stages, layers)
        frozen_units = {unit.name for unit in frozen}
        self.gatherer = ParameterGatherer(
            parameters, layers, data, subscriber, self.graph_breaks, frozen_units, subscribed=table.may_offload
        )
        self.gatherer.follow(orders, lookups=_lookups(self.stages))
        self.gradients = GradientCollector(
            _trained_units(orders, layers, frozen_units),
            GradientReducer(memory, settings.reduce_dtype, subscriber, self.graph_breaks, tied, settings.counts_zeros),
            self.gatherer.backward_done,
            counts_arrivals=counts_arrivals,
            # A process alone sends no messages, whose order would count.
            fixed_order=not (counts_arrivals and data.is_alone),
        )
        linears = linears or {}
        self._fused = FusedSums(self.gradients, self.gatherer, linears) if settings.fuses_sums else None
        self._places = GradientPlaces(self.gradients, parameters.views(), linears)
        for stage in self.stages:
            stage.place(parameters.views() | memory_for(table.buffers, device))
            stage.call_through(self.gatherer)
        self.gradients.watch({name: p for stage in self.stages for name, p in stage.global_parameters().items()})

    def publish(self) -> None:
        """Make the model's parameters equal to the master weights."""
        self.gatherer.finish_pending()
        if self.subscriber is not None:
            self.subscriber.publish()
        if not self.masters_are_parameters:
            self.parameters.copy_from(self.optimizer.master_weights)
        self.gatherer.changed()

    def step(self, norm: torch.Tensor, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> torch.Tensor:
        """See :meth:`MasterOptimizer.step`; the model's parameters follow, each before it is used."""
        self.gatherer.finish_pending()
        skipped = self.optimizer.step(norm, hyperparameters, loss_scale)
        if self._copies_each_step:
            self.parameters.copy_from(self.optimizer.master_weights)
        self.gatherer.changed()
        return skipped

    def finish(self) -> None:
        """Return when the last step is done and nobody needs its gradients any more."""
        if self.subscriber is not None:
            self.subscriber.finish()

    def close(self) -> None:
        """End the background work."""
        if self.subscriber is not None:
            self.subscriber.close()

    def release(self) -> None:
        """Leave gradients to autograd, and give up the optimizer's state and the gradients' memory."""
        self.gradients.unwatch()
        del self.optimizer, self.gradients, self._places

    def divide_groups(self, group_of: Mapping[str, int], origins: Sequence[int]) -> None:
        """Update parameters by other groups, between two steps; each is a part of one of the groups given at first.

        Args:
            group_of: global name -> number of the new group.
            origins: of each new group, the number of the first group.
        """
        divide = self.optimizer.divide_groups  # first: while its states are away it refuses, and nothing has changed
        self.finish()
        self.table.divide_groups(group_of)
        divide(origins)

    @property
    def can_add_gradients(self) -> bool:
        """Whether sums over several micro-batches have memory that is wide enough."""
        return self.settings.adds_gradients or self.settings.dtype == self.settings.wide

    def add_gradients(self) -> None:
        """Give sums over several micro-batches memory, between two steps."""
        read_gradients = self.optimizer.read_gradients  # first, as in divide_groups
        self.finish()
        self.settings = replace(self.settings, adds_gradients=True)
        self.gradients.memory.allocate(self.settings.gradient_dtype)
        read_gradients(self.gradients.memory.shard)

    def begin_gradients(self, num_micro_batches: int) -> None:
        """Begin a step."""
        wide = self.optimizer.master.dtype
        assert num_micro_batches == 1 or self.gradients.memory.shard.dtype == wide, "sums are wide"
        self.gradients.begin(num_micro_batches)
        if self._fused is not None:
            self._fused.begin()

    def copy_of_gradient(self, factor: float = 1.0) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """Copies of the final gradient's ranges, each where its range lives.

        Returns:
            Unit -> (first element in the unit's shard, values times ``factor``, fp32 or wider).
        """
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for one, values in self.optimizer.ranges_of("grad"):
            found.setdefault(one.unit, []).append((one.start, values.to(self.settings.wide, copy=True).mul_(factor)))
        return found

    def own_zeros(self) -> torch.Tensor:
        """This process's contribution to the number of zeros in the gradient (fp64)."""
        count = torch.tensor(float(self.optimizer.zeros_in_grad()), dtype=torch.float64, device=self.device)
        return count + self.gradients.reducer.zeros


class PipelinePasses(Observer):
    """Runs the passes of a step by the pipeline's schedule, and reports each pass to the engine.

    Args:
        engine: has the layers' parameters.
        pipeline: the layers.
        note: called with a phrase for what this process begins to do.

    Attributes:
        step: begins each note, such as ``iteration 12, ``.
        scale: the incoming gradient of each micro-batch's loss, on the device, so that a recorded step reads its
            present value. fp16 may be too narrow for it.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline, note: Callable[[str], None]):
        self.engine, self.pipeline, self._note, self.step = engine, pipeline, note, ""
        self.scale = torch.ones((), dtype=engine.settings.wide, device=engine.device)
        self._last = 0

    def run(self, inputs: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Accumulate the gradient of the step that :meth:`Engine.begin_gradients` has begun; it is final afterwards.

        Returns:
            The micro-batches' losses, if this process has the last layer; else nothing.
        """
        self._last = len(inputs) - 1
        losses = self.pipeline.forward_backward(inputs, grad=self.scale, observer=self)
        self._note(f"{self.step}gradient reduction")
        self.engine.gradients.reducer.finish()
        return losses

    def before_forward(self, micro_batch: int, virtual_stage: int) -> None:
        self._note(f"{self.step}micro-batch {micro_batch + 1}, forward")
        self.engine.gradients.in_last_forward = micro_batch == self._last

    def before_backward(self, micro_batch: int, virtual_stage: int, output: torch.Tensor) -> None:
        self._note(f"{self.step}micro-batch {micro_batch + 1}, backward")
        self.engine.gradients.begin_backward(virtual_stage, last=micro_batch == self._last)

    def after_backward(self, micro_batch: int, virtual_stage: int) -> None:
        self.engine.gradients.end_backward()


def _masters_are_parameters(table: ParameterTable, parameters: ParameterMemory, wide: torch.dtype) -> bool:
    """Whether the model's parameters can be the master weights themselves.

    Otherwise the optimizer writes them in the pass that updates the masters, or they are copied after the step. All
    three give the same bits; the first two save a pass over memory.
    """
    all_here = not table.elements(Home.HOST) and not parameters.on_host
    as_wide = parameters.everything.dtype == wide and len(parameters.everything) == table.length()
    return as_wide and all_here and all(unit.shards == 1 for unit in table.units)


def _call_orders(stages: Sequence[EngineStage], layers: Collection[str]) -> list[list[str]]:
    """For each stage its layers with parameters, as forward calls them."""
    return [[name for name in stage.call_order() if name in layers] for stage in stages]


def _lookups(stages: Sequence[EngineStage]) -> list[str]:
    return [name for stage in stages for name in stage.lookups()]


def _trained_units(
    orders: Sequence[Sequence[str]], layers: Mapping[str, Sequence[str]], frozen: Collection[str]
) -> list[list[str]]:
    """For each stage the units that get gradients, in the order of its layers."""
    return [[unit for name in order for unit in layers[name] if unit not in frozen] for order in orders]
