"""``deepspeed.pipe``: pipelines of layers with DeepSpeed's arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gptpar.adapter.built_layers import BuiltLayer
from gptpar.adapter.deferred import deferred_init
from gptpar.adapter.pipeline_module import PipelineModule, as_spec
from gptpar.deepspeed.grid import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from gptpar.deepspeed.recomputation import checkpoint, non_reentrant_checkpoint
from gptpar.deepspeed.start import set_random_seed
from gptpar.errors import ConfigError
from gptpar.model import layer_spec
from gptpar.pipeline import partition
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from gptpar.topology.world import join_world


class PipeLayerSpec(layer_spec.LayerSpec):
    """How to build a layer; all keyword arguments are the layer's.

    Args:
        typename: the layer's class.
        *module_args, **module_kwargs: its arguments.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        super().__init__(typename, *module_args)
        self.kwargs = module_kwargs
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        return super().build()


class PipeTiedLayerSpec(PipeLayerSpec, layer_spec.TiedLayerSpec):
    """A layer that shares its module with all others of its key, whose gradients are summed.

    Args:
        key: names the shared module.
        typename, *module_args, **module_kwargs: see :class:`PipeLayerSpec`.
        forward_fn: called as ``forward_fn(module, x)`` instead of the module.
        tied_weight_attr: without effect: all parameters of the module are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: Sequence[str] | str = ("weight",),
        **module_kwargs: Any,
    ):
        PipeLayerSpec.__init__(self, typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipeModule(PipelineModule):
    """:class:`gptpar.PipelineModule` with DeepSpeed's arguments.

    The layers' initial values are those of all layers built in order in one process, whatever the number of stages.

    Args:
        layers: layer specifications, modules, or functions of one tensor.
        num_stages: number of stages; or
        topology: a grid with the axes ``pipe`` and ``data``.
        loss_fn: ``loss_fn(output, labels)``.
        seed_layers: seed each layer's initial values with ``base_seed`` plus its number.
        seed_fn: how; default: :func:`gptpar.deepspeed.start.set_random_seed`.
        base_seed: see ``seed_layers``.
        partition_method: ``parameters``, ``uniform``, ``type:REGEX``, or boundaries such as ``0,7,14``.
        activation_checkpoint_interval: number of consecutive layers that are recomputed together; 0: none.
        activation_checkpoint_func: :func:`gptpar.deepspeed.recomputation.checkpoint` or torch's.
        checkpointable_layers: names of the classes that may be recomputed; default: all with parameters.
        dynamic_shape: without effect: shapes may always change from step to step.

    Attributes:
        grid: the processes and their groups, which is ``engine.grid``, too; ``None`` where there is no process group.

    Raises:
        ConfigError: the arguments contradict each other or the number of processes.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[torch.Tensor, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ):
        listed = [as_spec(layer, number) for number, layer in enumerate(layers)]
        interval = activation_checkpoint_interval
        if interval and activation_checkpoint_func not in (checkpoint, non_reentrant_checkpoint, torch_checkpoint):
            raise ConfigError(
                ["activation_checkpoint_func is a function of your own: leave it out, or recompute in the layer."]
            )
        kinds = [spec.cls.__name__ for spec in listed]
        self.activation_checkpoint_interval, self.seed_layers = interval, seed_layers

        def recompute(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
            for at in range(0, len(names) if interval else 0, interval or 1):
                group = tuple(names[at : at + interval])
                here = {kinds[number] for number, spec in enumerate(self.specs) if spec.name in group}
                if checkpointable_layers is None or here <= set(checkpointable_layers):
                    yield group

        grid = _topology(num_stages, topology)
        super().__init__(
            listed,
            topology=grid,
            loss_fn=loss_fn,
            partition_method=partition_method,
            build=_Builder(listed, base_seed if seed_layers else None, seed_fn or set_random_seed, grid.device),
            recompute=lambda names: tuple(recompute(names)),
        )
        self.stage_id, self.grid = self.stage, _grid_of(grid, topology)

    def mpu(self) -> PipelineParallelGrid | None:
        """The grid of processes and their groups; ``None`` where there is no process group."""
        return self.grid

    @property
    def parts(self) -> list[int]:
        """The boundaries: stage r has the layers ``parts[r]`` to ``parts[r + 1] - 1``."""
        return self.bounds

    def partitions(self) -> list[int]:
        """The same as :attr:`parts`."""
        return self.bounds

    def num_pipeline_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        return next(stage for stage in range(self.num_stages) if layer_idx < self.bounds[stage + 1])


class _Builder:
    """Builds layers with the random numbers that they would get if all were built here in order.

    Args:
        layers: all of them.
        seed: each layer is seeded with this plus its number; ``None``: they go on from torch's present state.
        seed_fn: seeds.
        device: where built layers go.
    """

    def __init__(
        self,
        layers: Sequence[layer_spec.LayerSpec],
        seed: int | None,
        seed_fn: Callable[[int], None],
        device: torch.device,
    ):
        self._device, self._states = device, dict[int, torch.Tensor]()
        tied: set[str] = set()
        for number, layer in enumerate(layers):
            if seed is not None:
                seed_fn(seed + number)
            key = getattr(layer, "key", None)
            if not isinstance(layer, BuiltLayer) and key not in tied:
                self._states[id(layer)] = torch.get_rng_state()
                with deferred_init(seed=None):
                    layer.build()
                tied |= set() if key is None else {key}

    def __call__(self, spec: layer_spec.LayerSpec) -> nn.Module:
        if id(spec) not in self._states:
            return spec.build().to(self._device)
        with torch.random.fork_rng():
            torch.set_rng_state(self._states[id(spec)])
            return spec.build().to(self._device)


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> Topology:
    if num_stages is None and topology is None:
        raise ConfigError(["PipelineModule needs num_stages or a topology."])
    rank, device = join_world(30.0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    stages = topology.get_dim("pipe") if topology is not None else num_stages or 0
    problems = [] if topology is None else list(_problems_of(topology, world))
    if stages < 1 or world % stages:
        problems.append(f"{world} processes cannot be cut into pipelines of {stages} stages: start a multiple.")
    if problems:
        raise ConfigError(problems)
    return make_topology(Mesh(data=world // stages, pipeline=stages), rank, device)


def _problems_of(topology: ProcessTopology, world: int) -> Iterator[str]:
    if (size := topology.get_dim("model")) > 1:
        yield f"the topology's model axis has {size} processes: leave it out."
    if (size := topology.world_size()) != world:
        yield f"the topology has {size} processes, and there are {world}: let them agree."
    if [axis for axis in topology.axes if axis in ("pipe", "data")] == ["data", "pipe"]:
        yield "the topology has the axis data before pipe: name pipe first, since ranks of a stage are in a row."


def _grid_of(topology: Topology, axes: ProcessTopology | None) -> PipelineParallelGrid | None:
    if not dist.is_initialized():
        return None
    axes = axes or PipeDataParallelTopology(topology.mesh.pipeline, topology.mesh.data)
    return PipelineParallelGrid(axes, known=topology)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Boundaries of parts with equal numbers of items; empty parts at the end where there are fewer items."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return partition.uniform(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries that minimise the weight of the heaviest part."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return partition.balanced(weights, num_parts)


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Sums of the first weights: of one, of two, and so on."""
    return list(itertools.accumulate(weights))
