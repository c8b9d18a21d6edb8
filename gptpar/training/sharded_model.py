"""A GPT as one process holds it: its stages, its share of each layer, its shard of the optimizer's state.

The order in which the parallelisms are applied is readable in the constructor: tensor (inside the layers), recompute,
pipeline, then ZeRO over the data axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import cast

import torch

from gptpar.config import Config
from gptpar.config.gradients import adds_gradients
from gptpar.config.graph import wants_graph
from gptpar.engine.data_axis import DataAxis
from gptpar.engine.gradients import GradientSum
from gptpar.engine.host_gradients import HostGradients, sum_together
from gptpar.engine.master_adamw import MasterAdamW
from gptpar.engine.parameters import LiveParameters
from gptpar.engine.runs import device_runs, divide, runs_of
from gptpar.engine.step_graph import HostCalls
from gptpar.engine.units import Unit
from gptpar.model.dtypes import DTYPES
from gptpar.model.flops import Shape, layer_flops
from gptpar.model.gpt import gpt_layers
from gptpar.offload.build import host_pieces, make_host_optimizer
from gptpar.offload.early_rows import EarlyRows, early_unit
from gptpar.optim.grad_norm import GradientNorm
from gptpar.optim.spans import counted
from gptpar.pipeline.module import LayerSplit, PipelineModule, split_layers
from gptpar.pipeline.stage import Fields, ParameterInfo, Stage, build_on_meta
from gptpar.placement import TENSOR
from gptpar.recompute import Keep, recompute_groups
from gptpar.tensor_parallel import TensorAxis, symmetric_memory_works
from gptpar.topology import Layout, Topology


class ShardedModel:
    """Builds everything that belongs to the weights.

    Args:
        config: resolved, with the padded vocabulary filled.
        topology: this process's place.
        tries_memory: the host's share has no state: gradients that it would get are dropped, no step can be taken.

    Attributes:
        infos: what is known of each parameter of this process.
        units: the layers' flat ranges, in forward order.
    """

    def __init__(self, config: Config, topology: Topology, *, tries_memory: bool = False):
        self.topology = topology
        dtype = DTYPES[config.precision.dtype]
        wide = torch.promote_types(dtype, torch.float32)
        tensor, data = tensor_axis(config, topology), data_axis(config, topology)
        self.pipeline = make_pipeline(config, topology, tensor, dtype)
        self.stages: list[Stage] = list(self.pipeline.chunks)  # type: ignore[arg-type]
        self.infos: dict[str, ParameterInfo] = {k: v for stage in self.stages for k, v in stage.infos().items()}
        layers = {name: params for stage in self.stages for name, params in stage.parameters_by_layer().items()}
        self.units = [Unit.of(name, {p: self.infos[p] for p in params}, data.shards) for name, params in layers.items()]
        chunks = [[name for name in stage.call_order() if name in layers] for stage in self.stages]
        self._tensor, self._data = tensor, data
        self.division = divide(self.units, data.shard, config.offload.ratio or 0.0)
        counting = partial(runs_of, first_tensor_rank=tensor.rank == 0, copies=self.pipeline.copies)
        self._runs = runs = {unit.name: list(counting(unit, data.shard)) for unit in self.units}
        on_device, device = self.division.on_device, topology.device
        pieces = host_pieces(self.units, runs, on_device)
        sums = adds_gradients(config, topology.layout.world_size)
        early = early_unit(config, topology.layout, self.units, on_device)
        self.host = None if tries_memory else make_host_optimizer(config, pieces, device, dtype, wide, early, sums=sums)
        self.host_calls = None if self.host is None else HostCalls(self.host)
        ahead = device.type == "cuda" and wants_graph(config, topology.layout.data)
        self._norm = GradientNorm({unit: counted(its) for unit, its in runs.items()})
        self._host_gradients = HostGradients(
            self.host_calls,
            pieces,
            self._norm,
            data.shard,
            tensor,
            self.pipeline.tied_groups,
            wide,
            device,
            runs=runs,
            counts_zeros=config.logging.log_num_zeros_in_grad,
            early=early,
        )
        reduce_dtype = torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else wide
        self.gradients = GradientSum(
            self.units,
            chunks,
            data,
            wide if sums else dtype,
            device,
            reduce_dtype=reduce_dtype,
            done=partial(_done, self),
            on_device=on_device,
            arriving_dtype=dtype,
            to_host=self._host_gradients.take,
            to_host_early=self._host_gradients.take_early,
            ahead=ahead,
        )
        self.optimizer = MasterAdamW(
            self.units,
            self.infos,
            self.division,
            device_runs(self.units, on_device, runs),
            data.shard,
            self.gradients.shard,
            config.optimizer,
            self.host,
        )
        on_host = config.offload.cpu_parameters
        everything_here = self.division.offloaded == 0 and not on_host
        masters_are_live = dtype == wide and data.shards == 1 and everything_here
        shared = self.optimizer.master if masters_are_live else None
        self.live = LiveParameters(self.units, chunks, data, dtype, device, shared, self.host_calls, on_host)
        if self.host is not None:
            self.host.attach({p.unit: self.live.own(p.unit)[on_device[p.unit] :] for p in pieces})
        self._writes_live = not masters_are_live and not on_host
        if self._writes_live:
            self.optimizer.attach({unit.name: self.live.own(unit.name)[: on_device[unit.name]] for unit in self.units})
        storage = self.live.views()
        for stage in self.stages:
            stage.place(storage)
            stage.caller = self.live
        self.gradients.watch({k: v for stage in self.stages for k, v in stage.global_parameters().items()})
        self._early = EarlyRows.of(early, on_device, self.host, self.stages, self.gradients)

    def publish(self) -> None:
        """Make the live parameters equal to the masters."""
        if self.host is not None:
            self.host.publish()
        self.live.take(self.optimizer.masters)
        self.live.changed()

    def step(self, norm: torch.Tensor, lr: float, weight_decay: float, loss_scale: float) -> torch.Tensor:
        """See :meth:`MasterAdamW.step`; the live parameters follow, each before it is used."""
        skipped = self.optimizer.step(norm, lr, weight_decay, loss_scale)
        if not self._writes_live:
            self.live.take(self.optimizer.masters)
        self.live.changed()
        return skipped

    def close(self) -> None:
        """End the CPU optimizer's thread."""
        if self.host is not None:
            self.host.close()

    def train(self) -> None:
        """Dropout on."""
        self.pipeline.train()

    def eval(self) -> None:
        """Dropout off."""
        self.pipeline.eval()

    def expect_tokens(self, tokens: torch.Tensor) -> None:
        """A step begins: the tokens of its last micro-batch."""
        if self._early is not None:
            self._early.expect_step(tokens)

    def begin_gradients(self, num_micro_batches: int) -> None:
        """A step begins."""
        assert num_micro_batches == 1 or self.optimizer.grad.dtype == self.optimizer.master.dtype  # sums are wide
        self._norm.begin()
        self.gradients.begin(num_micro_batches)
        self._host_gradients.begin(num_micro_batches)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Wait for the sums over the data axis; add what copies of a parameter elsewhere have seen."""
        self.gradients.finish()
        sum_together(self._addends, self._tensor.group)
        for name, group in self.pipeline.tied_groups.items():
            self._host_gradients.finish(name, self.gradients.shards[name], group)

    def square_of_grad(self) -> torch.Tensor:
        """What this process adds to the sum of squares of the whole gradient (fp64)."""
        self._norm.measure(self._undivided)
        return self._norm.square(self.topology.device) / self._owners

    def square_of_weights(self) -> torch.Tensor:
        """What this process adds to the sum of squares of all master weights (fp64)."""
        return self.optimizer.square_of_weights() / self._owners

    @property
    def _undivided(self) -> dict[str, torch.Tensor]:
        """Gradients, by unit, of which the device updates every element."""
        whole = (unit for unit in self.units if self.division.on_device[unit.name] == unit.shard_length)
        return {unit.name: self.gradients.shards[unit.name] for unit in whole}

    @cached_property
    def _addends(self) -> list[torch.Tensor]:
        """Views of these where each tensor-parallel rank has an addend of the gradient; they stay where they are."""
        shards = [(shard, run) for unit, shard in self._undivided.items() for run in self._runs[unit]]
        return [shard[run.start : run.stop] for shard, run in shards if TENSOR in run.grad_sums]

    @property
    def _owners(self) -> int:
        """Data-parallel processes that have the same elements."""
        return self._data.size if self._data.shards == 1 else 1

    def own_zeros(self) -> torch.Tensor:
        """What this process adds to the number of zeros in the gradient (fp64)."""
        count = torch.tensor(float(self.optimizer.zeros_in_grad()), dtype=torch.float64, device=self.topology.device)
        return (count + self._host_gradients.zeros) / self._owners


def _done(model: ShardedModel, unit: str) -> None:
    model.live.backward_done(unit)


def tensor_axis(config: Config, topology: Topology) -> TensorAxis:
    """This process's place on the tensor axis."""
    group, parallel = topology.tensor_group, config.parallel
    fused = parallel.tp_comm_overlap and group is not None and symmetric_memory_works(group)
    return TensorAxis(topology.layout.tensor, topology.tensor_rank, group, parallel.sequence_parallel, fused)


def data_axis(config: Config, topology: Topology) -> DataAxis:
    """This process's place on the data axis; alone there, nothing is sharded."""
    size = topology.layout.data
    stage = (config.parallel.zero_stage or 0) if size > 1 else 0
    return DataAxis(size, topology.data_rank, topology.data_group, stage)


def make_pipeline(config: Config, topology: Topology, tensor: TensorAxis, dtype: torch.dtype) -> PipelineModule:
    """The GPT cut into stages, its layers without storage."""
    recompute, modules = config.recompute, frozenset(config.recompute.recompute_modules or ())
    width = config.model.hidden_size
    assert width is not None

    def boundary(sender: int, x: torch.Tensor, fields: Fields) -> tuple[torch.Size, torch.dtype]:
        return torch.Size([x.numel() // (tensor.size if tensor.splits_tokens else 1), width]), dtype

    partition = None
    if recompute.distribute_saved_activations and tensor.group is not None:
        partition = (tensor.group, tensor.rank, tensor.size)
    return PipelineModule(
        gpt_layers(config.model, tensor, recompute_modules=modules),
        topology=topology,
        partition_method=config.parallel.pipeline_partition_method,
        num_virtual_stages=config.parallel.num_chunks,
        flops=layer_flops(cast(Shape, config.model)),
        build=build_on_meta,
        recompute=partial(recomputed_blocks, config),
        keep=Keep(partition, recompute.checkpoint_in_cpu, random=False),  # masks are functions of their seeds
        boundary=boundary,
    )


def recomputed_blocks(config: Config, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of blocks that are recomputed together, of the layers (by name) of one piece of the pipeline."""
    return recompute_groups(config.recompute, [name for name in names if name.startswith("layers.")])


def split_of(config: Config, layout: Layout) -> LayerSplit:
    """Which layers go to which stage."""
    return split_layers(
        gpt_layers(config.model),
        layout.pipeline,
        config.parallel.num_chunks,
        config.parallel.pipeline_partition_method,
        layer_flops(cast(Shape, config.model)),
    )
