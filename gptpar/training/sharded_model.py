"""A GPT as one process holds it: its stages, its share of each layer, its shard of the optimizer's state.

The order in which the parallelisms are applied is readable in the constructor: tensor (inside the layers), recompute,
pipeline, then ZeRO over the data axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from gptpar.config import Config
from gptpar.model.flops import Shape, layer_flops
from gptpar.model.gpt import gpt_layers
from gptpar.optim.adamw import MasterAdamW, make_runs
from gptpar.pipeline.module import LayerSplit, PipelineModule, split_layers
from gptpar.pipeline.stage import Fields, ParameterInfo, Stage, build_on_meta
from gptpar.recompute import Keep, recompute_groups
from gptpar.tensor_parallel import TensorAxis, symmetric_memory_works
from gptpar.topology import Layout, Topology
from gptpar.zero.gradients import GradientSum
from gptpar.zero.live import LiveParameters
from gptpar.zero.place import DataAxis
from gptpar.zero.units import Unit

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class ShardedModel:
    """Builds everything that belongs to the weights.

    Args:
        config: resolved, with the padded vocabulary filled.
        topology: this process's place.

    Attributes:
        infos: what is known of each parameter of this process.
        units: the layers' flat ranges, in forward order.
    """

    def __init__(self, config: Config, topology: Topology):
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
        self._runs = make_runs(self.units, data.shard, first_tensor_rank=tensor.rank == 0, copies=self.pipeline.copies)
        self._tensor, self._data = tensor, data

        reduce_dtype = torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else wide
        device = topology.device
        done = partial(_done, self)
        self.gradients = GradientSum(self.units, chunks, data, wide, device, reduce_dtype=reduce_dtype, done=done)
        self.optimizer = MasterAdamW(
            self.units, self.infos, self._runs, data.shard, self.gradients.shard, config.optimizer
        )
        masters_are_live = dtype == wide and data.shards == 1
        shared = self.optimizer.master if masters_are_live else None
        self.live = LiveParameters(self.units, chunks, data, dtype, device, shared)
        storage = self.live.views()
        for stage in self.stages:
            stage.place(storage)
            stage.caller = self.live
        self.gradients.watch({k: v for stage in self.stages for k, v in stage.global_parameters().items()})

    def publish(self) -> None:
        """Make the live parameters equal to the masters."""
        self.live.publish(self.optimizer.masters)

    def train(self) -> None:
        """Dropout on."""
        self.pipeline.train()

    def eval(self) -> None:
        """Dropout off."""
        self.pipeline.eval()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Wait for the sums over the data axis; add what copies of a parameter elsewhere have seen."""
        self.gradients.finish()
        if self._tensor.splits_tokens:  # a whole parameter has seen this rank's tokens only
            shard = self.gradients.shard
            pieces = [shard[run.start : run.stop] for run in self._runs if run.replicated]
            if pieces:
                flat = torch.cat(pieces)
                dist.all_reduce(flat, group=self._tensor.group)
                torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
        for name, group in self.pipeline.tied_groups.items():
            dist.all_reduce(self.gradients.shards[name], group=group)

    def own_square(self, buffer: torch.Tensor) -> torch.Tensor:
        """What this process adds to the sum of squares of all elements, of a buffer like the masters (fp64)."""
        return self.optimizer.square_of(buffer) / (self._data.size if self._data.shards == 1 else 1)

    def own_zeros(self) -> torch.Tensor:
        """What this process adds to the number of zeros in the gradient (fp64)."""
        count = torch.tensor(float(self.optimizer.zeros_in_grad()), dtype=torch.float64, device=self.topology.device)
        return count / (self._data.size if self._data.shards == 1 else 1)


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
        keep=Keep(partition, recompute.checkpoint_in_cpu, random=config.model.has_dropout),
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
