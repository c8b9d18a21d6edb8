"""``PipelineModule``: any list of layers as a pipeline, with or without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.adapter.abstract_run import AbstractRun
from gptpar.adapter.built_layers import BuiltLayer, FunctionLayer, tie_functions
from gptpar.errors import ConfigError, GptparError, is_whole, wrong_type
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.pipeline.layer_split import LayerSplit, split_layers
from gptpar.pipeline.recompute import Keep
from gptpar.pipeline.runtime import Boundary, Pipeline
from gptpar.pipeline.stage import Fields
from gptpar.system.hashes import seed_of
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import EXPERT, TENSOR, Mesh
from gptpar.topology.placement import REPLICATED


class PipelineModule(Pipeline):
    """A sequence of layers, divided into the stages of a pipeline; each process builds its own layers only.

    Args:
        layers: :class:`LayerSpec`, :class:`TiedLayerSpec`, modules, or functions of one tensor. A function that uses
            the parameters of a module in the list is tied to it; one that uses other modules has their parameters.
        num_stages: number of stages. It divides the number of processes; the quotient is the data axis's size.
        loss_fn: ``loss_fn(output, labels)`` -> scalar; by default the last layer's output is the loss.
        partition_method: ``parameters``, ``flops``, ``uniform``, ``type:REGEX`` (layers whose class matches count 1,
            others 0) or explicit boundaries such as ``0,7,14``.
        num_virtual_stages: virtual stages of each process, for the interleaved schedule (arXiv 2104.04473).
        topology: this process's place on all axes, instead of ``num_stages``.
        flops: each layer's cost, for the partition method ``flops``.
        split: the assignment of layers to stages, instead of ``partition_method`` and ``flops``.
        build: makes a layer from its specification. By default the layer draws its initial values itself, from a seed
            that depends on its name, so that they do not depend on the number of stages.
        recompute: takes the names of a virtual stage's layers and returns groups of consecutive ones, which are
            recomputed in the backward pass.
        keep: how the inputs of such groups are kept.
        token_splits: number of tensor ranks that divide the tokens between layers (sequence parallelism).
        boundary: shapes and dtypes between stages; by default found once by running all layers on shapes alone.
        base_seed: for the default ``build``.

    Raises:
        ConfigError: the partition is impossible, there is neither ``num_stages`` nor ``topology``, or a function uses
            parameters of several layers.
        TypeError: the topology has tensor parallelism, and a layer does not declare the placement of its parameters'
            values and gradients (:mod:`gptpar.topology.placement`).
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[[torch.Tensor], torch.Tensor]],
        num_stages: int | None = None,
        *,
        loss_fn: Callable[[torch.Tensor, Any], torch.Tensor] | None = None,
        partition_method: str = "parameters",
        num_virtual_stages: int = 1,
        topology: Topology | None = None,
        flops: Sequence[float] = (),
        split: LayerSplit | None = None,
        build: Callable[[LayerSpec], nn.Module] | None = None,
        recompute: Callable[[Sequence[str]], Sequence[tuple[str, ...]]] = lambda names: (),
        keep: Keep | None = None,
        token_splits: int = 1,
        boundary: Boundary | None = None,
        base_seed: int = 1234,
    ):
        _require_types(layers, num_stages, loss_fn, partition_method, topology)
        topology = topology or _topology_of(None if num_stages is None else int(num_stages))
        specs = tie_functions([as_spec(layer, number) for number, layer in enumerate(layers)])
        stages = topology.mesh.pipeline
        if num_virtual_stages > 1 and stages == 1:
            raise ConfigError([f"{num_virtual_stages} virtual stages need a pipeline of at least 2 stages."])
        super().__init__(
            specs,
            topology,
            split=split or split_layers(specs, stages, num_virtual_stages, partition_method, flops),
            build=build or (lambda spec: seeded(spec, base_seed).to(topology.device)),
            boundary=boundary or self._abstract_boundary,
            num_virtual_stages=num_virtual_stages,
            recompute=recompute,
            keep=keep,
            token_splits=token_splits,
        )
        self._loss_fn, self._abstract = loss_fn, AbstractRun(specs)
        self._summed_over = self._groups_of_sums()

    def _groups_of_sums(self) -> dict[str, list[dist.ProcessGroup]]:
        """Global name -> the groups over which the parameter's gradient is summed, besides a tied layer's copies.

        Layers need not declare their parameters where no axis splits them.
        """
        splits = self.topology.mesh.size(TENSOR, EXPERT) > 1
        found: dict[str, list[dist.ProcessGroup]] = {}
        for stage in self.stages_here:
            infos = stage.infos() if splits else {}
            for name in stage.global_parameters():
                placement = infos[name].placement if splits else REPLICATED
                groups = [
                    self.topology.group(*placement.copies_over),
                    *map(self.topology.group, placement.gradient_sum),
                ]
                found[name] = [group for group in groups if group is not None]
        return found

    def _abstract_boundary(self, sender: int, x: torch.Tensor, fields: Fields) -> tuple[torch.Size, torch.dtype]:
        return self._abstract(x, fields)[self.bounds[sender + 1] - 1]

    def expect_dtype(self, dtype: torch.dtype) -> None:
        """Announce the dtype of the floating-point parameters; it decides the dtype of tensors between stages."""
        self._abstract.dtype = dtype

    def _loss_of(self, y: torch.Tensor, fields: Fields) -> torch.Tensor:
        return _scalar(y if self._loss_fn is None else self._loss_fn(y, fields["labels"]), self._loss_fn)

    def train_batch(self, micro_batches: Iterable[tuple[torch.Tensor, Any]]) -> torch.Tensor:
        """Forward and backward of one step; afterwards your own optimizer takes the step and clears ``.grad``.

        As with autograd, gradients are added to those that ``.grad`` holds already.

        Args:
            micro_batches: (input, labels) of each, on this process's device; all stages get the same ones, each
                data-parallel rank gets its own.

        Returns:
            The mean loss over all micro-batches and data-parallel ranks, on every process, without auxiliary losses.
            Each parameter's ``.grad`` has grown by the gradient of that mean, and of the mean auxiliary losses.
        """
        batches = [(x, {"labels": labels}) for x, labels in micro_batches]
        device, dp = self.topology.device, self.topology.mesh.data
        weight = torch.tensor(1 / (len(batches) * dp), device=device)
        earlier = {parameter: parameter.grad for parameter in self.parameters() if parameter.grad is not None}
        for parameter in earlier:  # they have been reduced already
            parameter.grad = None
        losses = self.forward_backward(batches, grad=weight)
        self._sum_gradients()
        for parameter, grad in earlier.items():
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        mean = torch.stack(losses).sum().double() * weight.double() if losses else weight.double() * 0
        return self.topology.sum_over_all(mean / self.topology.mesh.tensor)

    def _sum_gradients(self) -> None:
        """Sum gradients over the data axis, a tied layer's copies and, if so declared, the tensor axis."""
        layers = {name: own for stage in self.stages_here for name, own in stage.parameters_by_layer().items()}
        for name, parameters in layers.items():  # a tied layer may be in several virtual stages, and is summed once
            tied = self.tied_groups.get(name)
            for full_name, parameter in parameters.items():
                if parameter.grad is None and tied is not None:  # unused here, but perhaps used on the other stage
                    parameter.grad = torch.zeros_like(parameter)
                for group in (*self._summed_over[full_name], *(() if tied is None else (tied,))):
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad, group=group)


def _scalar(loss: torch.Tensor, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        who = "the last layer returned" if loss_fn is None else "loss_fn returned"
        remedy = ": pass loss_fn=lambda output, labels: ..., or let it return" if loss_fn is None else ": let it return"
        raise GptparError(f"{who} {what}, which is no loss{remedy} a scalar.")
    return loss.reshape(()) if loss.dim() else loss


def _require_types(layers: Any, num_stages: Any, loss_fn: Any, partition_method: Any, topology: Any) -> None:
    needed = {
        "layers": (layers, isinstance(layers, Iterable), "a list of LayerSpecs, modules or functions is needed"),
        "num_stages": (num_stages, num_stages is None or is_whole(num_stages), "a whole number is needed"),
        "loss_fn": (loss_fn, loss_fn is None or callable(loss_fn), "a function of output and labels is needed"),
        "partition_method": (partition_method, isinstance(partition_method, str), "a text such as uniform is needed"),
        "topology": (topology, isinstance(topology, Topology | None), "leave it out, and give num_stages"),
    }
    wrong = [(name, value, why) for name, (value, fits, why) in needed.items() if not fits]
    problems = [wrong_type(f"PipelineModule: {name}", value, why) for name, value, why in wrong]
    if problems:
        raise ConfigError(problems)


def as_spec(layer: Any, number: int) -> LayerSpec:
    """A layer as a specification with a name; one without is copied, as a list may have it several times.

    Raises:
        ConfigError: it is a pipeline.
        TypeError: it is no layer.
    """
    if isinstance(layer, PipelineModule):
        raise ConfigError(["a PipelineModule cannot be a layer of another one."])
    if isinstance(layer, nn.Module):
        layer = BuiltLayer(layer)
    elif not isinstance(layer, LayerSpec):
        if not callable(layer):
            raise TypeError(f"layer {number} is {layer!r}: a LayerSpec, a module or a function is needed")
        layer = LayerSpec(FunctionLayer, layer)
    if not layer.name:
        layer = copy.copy(layer)
        layer.name = f"tied.{layer.key}" if isinstance(layer, TiedLayerSpec) else f"layers.{number}"
    return layer


def seeded(spec: LayerSpec, seed: int) -> nn.Module:
    """Build a layer; its own initialisation draws from a seed derived from ``seed`` and the layer's name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(seed, spec.name))
        return spec.build()


def _topology_of(num_stages: int | None) -> Topology:
    if num_stages is None:
        raise ConfigError(["PipelineModule needs num_stages or a topology."])
    world = dist.get_world_size() if dist.is_initialized() else 1
    if num_stages < 1 or world % num_stages:
        raise ConfigError([f"{world} processes cannot be cut into pipelines of {num_stages} stages."])
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return make_topology(Mesh(data=world // num_stages, pipeline=num_stages), rank, device)
