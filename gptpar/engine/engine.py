"""Training steps of a pipeline of layers over sharded parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptpar.engine.collector import GradientCollector
from gptpar.engine.data_axis import DataAxis
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.gradients import Gradients
from gptpar.engine.master_adamw import MasterAdamW
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.ranges import Home, Place
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.router import GradientRouter
from gptpar.engine.step_graph import Cuts
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.table import ParameterTable
from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.spans import GPT_FAMILIES, Family
from gptpar.pipeline.module import PipelineModule
from gptpar.pipeline.stage import Stage, memory_for
from gptpar.tensor_parallel import TensorAxis


def table_of(pipeline: PipelineModule, tensor: TensorAxis, data: DataAxis, ratio: float) -> ParameterTable:
    """The table of this process's parameters.

    Args:
        pipeline: the layers of this process.
        ratio: the host's share of the elements, 0 to 1.
    """
    stages: list[Stage] = list(pipeline.chunks)  # type: ignore[arg-type]
    infos = {name: info for stage in stages for name, info in stage.infos().items()}
    layers = {name: params for stage in stages for name, params in stage.parameters_by_layer().items()}
    return ParameterTable.of(
        {name: {param: infos[param] for param in params} for name, params in layers.items()},
        Place(data.shards, data.shard, data.size // data.shards, tensor.rank, pipeline.stage),
        ratio=ratio,
        tied=pipeline.tied_stages,
        buffers={name: info for stage in stages for name, info in stage.buffer_infos().items()},
    )


@dataclass(frozen=True)
class EngineSettings:
    """How an engine keeps and moves numbers.

    Attributes:
        dtype: of the model's parameters, and of the gradients that autograd produces.
        reduce_dtype: number format of gradients on their way between processes.
        adds_gradients: whether a step's gradient is a sum, over micro-batches or processes; such are kept wide.
        records_steps: whether steps are recorded as graphs.
        counts_zeros: whether zeros in gradients are counted.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    adds_gradients: bool = True
    records_steps: bool = False
    counts_zeros: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The number format of master weights, moments and sums."""
        return torch.promote_types(self.dtype, torch.float32)


class Engine:
    """Runs steps over memory that is already there.

    First who updates (the device's optimizer, beside a subscriber for the elements that it leaves), then who moves
    values during a step (gatherer, router, reducer, collector).

    Args:
        pipeline: the layers of this process, without storage.
        table: of their parameters.
        parameters: the memory of the model's parameters.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        device: where layers compute.
        subscriber: updates the elements that are not the device's; ``None``: nobody does.
        families: of the parameter groups (:class:`MasterAdamW`).

    Attributes:
        pipeline, table, parameters, device, subscriber: as given.
        stages: the pipeline's virtual stages on this process.
        optimizer: of the device's elements, through which the subscriber gets its steps, too.
        gatherer: brings parameters before layers are called.
        gradients: collector, reducer and router.
        cuts: where the host acts amid the launches of a step.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        table: ParameterTable,
        parameters: ParameterMemory,
        tensor: TensorAxis,
        data: DataAxis,
        settings: EngineSettings,
        clip_grad: float,
        device: torch.device,
        subscriber: Subscriber | None = None,
        *,
        families: Sequence[Family] = GPT_FAMILIES,
    ):
        self.pipeline, self.table, self.parameters, self.device = pipeline, table, parameters, device
        self.subscriber, self.cuts = subscriber, Cuts()
        self.stages: list[Stage] = list(pipeline.chunks)  # type: ignore[arg-type]
        memory = GradientMemory(
            table,
            data,
            settings.wide if settings.adds_gradients else settings.dtype,
            device,
            arriving_dtype=settings.dtype,
            ahead=settings.records_steps,
        )
        # Whether the optimizer works on the parameters themselves, writes them beside its masters, or they are copied.
        all_here = not table.elements(Home.HOST) and not parameters.on_host
        masters_are_parameters = settings.dtype == settings.wide and data.shards == 1 and all_here
        writes_parameters = not masters_are_parameters and not parameters.on_host
        written = {unit: shard[: table.on_device[unit]] for unit, shard in parameters.shards.items()}
        self._copies_at_start, self._copies_each_step = not masters_are_parameters, parameters.on_host
        self.optimizer = MasterAdamW(
            table,
            memory.shard,
            clip_grad,
            subscriber,
            families=families,
            master=parameters.everything if masters_are_parameters else None,
            live=written if writes_parameters else None,
        )

        units_of = [[name for name in stage.call_order() if name in parameters.full] for stage in self.stages]
        self.gatherer = ParameterGatherer(parameters, units_of, data, subscriber, self.cuts)
        router = GradientRouter(
            table,
            memory,
            tensor.group,
            pipeline.tied_groups,
            subscriber,
            self.cuts,
            counts_zeros=settings.counts_zeros,
        )
        reducer = GradientReducer(memory, data, settings.reduce_dtype, router)
        collector = GradientCollector(table.units, units_of, memory, reducer, self.gatherer.backward_done)
        self.gradients = Gradients(memory, collector, reducer, router)
        for stage in self.stages:
            stage.place(parameters.views() | memory_for(table.buffers, device))
            stage.caller = self.gatherer
        collector.watch({name: p for stage in self.stages for name, p in stage.global_parameters().items()})

    def publish(self) -> None:
        """Make the model's parameters equal to the master weights."""
        if self.subscriber is not None:
            self.subscriber.publish()
        if self._copies_at_start:
            self.parameters.copy_from(self.optimizer.masters)
        self.gatherer.changed()

    def step(self, norm: torch.Tensor, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> torch.Tensor:
        """See :meth:`MasterAdamW.step`; the model's parameters follow, each before it is used."""
        skipped = self.optimizer.step(norm, hyperparameters, loss_scale)
        if self._copies_each_step:
            self.parameters.copy_from(self.optimizer.masters)
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

    def train(self) -> None:
        """Dropout on."""
        self.pipeline.train()

    def eval(self) -> None:
        """Dropout off."""
        self.pipeline.eval()

    def begin_gradients(self, num_micro_batches: int) -> None:
        """A step begins."""
        assert num_micro_batches == 1 or self.gradients.shard.dtype == self.optimizer.master.dtype  # sums are wide
        self.gradients.begin(num_micro_batches)

    def square_of_grad(self) -> torch.Tensor:
        """What this process adds to the sum of squares of the whole gradient (fp64)."""
        return self.gradients.square() / self._owners

    def square_of_weights(self) -> torch.Tensor:
        """What this process adds to the sum of squares of all master weights (fp64)."""
        return self.optimizer.square_of_weights() / self._owners

    def own_zeros(self) -> torch.Tensor:
        """What this process adds to the number of zeros in the gradient (fp64)."""
        count = torch.tensor(float(self.optimizer.zeros_in_grad()), dtype=torch.float64, device=self.device)
        return (count + self.gradients.router.zeros) / self._owners

    @property
    def _owners(self) -> int:
        """Data-parallel processes that have the same elements."""
        return self.table.place.replicas
