"""A model divided into pipeline stages, and the execution of a schedule's instructions on the stages of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline.auxiliary_losses import AuxiliaryLosses
from gptpar.pipeline.layer_split import LayerSplit
from gptpar.pipeline.recompute import Keep
from gptpar.pipeline.schedules import (
    Action,
    Backward,
    Forward,
    ReceiveBackward,
    ReceiveForward,
    SendBackward,
    SendForward,
    forward_only,
    instructions,
    interleaved,
)
from gptpar.pipeline.stage import Fields, Stage
from gptpar.topology.groups import Link, Links, Topology

Of = TypeVar("Of")

Boundary = Callable[[int, torch.Tensor, Fields], tuple[torch.Size, torch.dtype]]
"""(shape, dtype) of a virtual stage's output, from its number in the model and the micro-batch's input and fields."""

MicroBatch = tuple[torch.Tensor, Fields]


class Observer:
    """Is called before each forward pass, and before and after each backward pass of this process; does nothing.

    ``virtual_stage`` is the index among this process's; ``output`` is the tensor from which the backward pass begins.
    """

    def before_forward(self, micro_batch: int, virtual_stage: int) -> None: ...

    def before_backward(self, micro_batch: int, virtual_stage: int, output: torch.Tensor) -> None: ...

    def after_backward(self, micro_batch: int, virtual_stage: int) -> None: ...


class Pipeline(nn.Module):
    """Layers divided into the stages of a pipeline; each process builds its own layers only.

    Args:
        specs: of all layers, with names. The last layer's output is the loss.
        topology: this process's place on all axes.
        split: the assignment of layers to stages.
        build: makes a layer from its specification.
        boundary: shapes and dtypes between stages.
        num_virtual_stages: virtual stages of each process, for the interleaved schedule (arXiv 2104.04473).
        recompute: takes the names of a virtual stage's layers and returns groups of consecutive ones, which are
            recomputed in the backward pass.
        keep: how the inputs of recomputed groups are kept until the backward pass.
        on_host: names of layers that are not recomputed and whose saved tensors go to the host.
        token_splits: number of tensor ranks that divide the tokens between layers (sequence parallelism).
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        topology: Topology,
        *,
        split: LayerSplit,
        build: Callable[[LayerSpec], nn.Module],
        boundary: Boundary,
        num_virtual_stages: int = 1,
        recompute: Callable[[Sequence[str]], Sequence[tuple[str, ...]]] = lambda names: (),
        keep: Keep | None = None,
        on_host: Collection[str] = (),
        token_splits: int = 1,
    ):
        super().__init__()
        self.specs, self.topology, self._boundary = specs, topology, boundary
        self.num_stages, self.stage = topology.mesh.pipeline, topology.stage
        self.num_virtual_stages, self.split, self.bounds = num_virtual_stages, split, split.bounds
        self.auxiliary = AuxiliaryLosses([name for spec in specs for name in spec.auxiliary_losses], token_splits)
        self.chunks = nn.ModuleList(self._build_stages(build, recompute, keep, on_host))
        self._transport = None if topology.links is None else Transport(topology.links)
        self.tied_stages = split.tied_stages(specs)
        groups = {name: topology.group_of_stages(stages) for name, stages in self.tied_stages.items()}
        self.tied_groups = {name: group for name, group in groups.items() if group is not None}

    def _build_stages(
        self,
        build: Callable[[LayerSpec], nn.Module],
        recompute: Callable[[Sequence[str]], Sequence[tuple[str, ...]]],
        keep: Keep | None,
        on_host: Collection[str],
    ) -> Iterator[Stage]:
        """This process's virtual stages; a tied layer that several of them have is one module."""
        tied: dict[str, nn.Module] = {}
        for part in range(self.stage, len(self.bounds) - 1, self.num_stages):
            mine = self.specs[self.bounds[part] : self.bounds[part + 1]]
            groups = recompute([spec.name for spec in mine])
            how: dict[str, Any] = {"recompute": groups, "keep": keep, "on_host": on_host}
            yield Stage(mine, build=build, tied=tied, auxiliary=self.auxiliary, **how)

    def by_unit(self, of_layers: Mapping[str, Of]) -> dict[str, Of]:
        """Unit of this process -> what its layer has; see :meth:`Stage.units_by_layer`."""
        units = {layer: units for stage in self.stages_here for layer, units in stage.units_by_layer().items()}
        return {unit: value for layer, value in of_layers.items() for unit in units.get(layer, ())}

    @property
    def stages_here(self) -> list[Stage]:
        """This process's virtual stages."""
        return list(self.chunks)  # type: ignore[arg-type]

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], *, grad: torch.Tensor | None = None, observer: Observer | None = None
    ) -> list[torch.Tensor]:
        """Run the schedule: gradients are added to the parameters' ``.grad``.

        Args:
            micro_batches: (input, fields by name) of each, the same on all stages.
            grad: scalar, incoming gradient of each micro-batch's loss; default 1.
            observer: called around each forward and backward pass.

        Returns:
            The micro-batches' losses in the order of computation, if this process has the last layer; else nothing.
        """
        return self._run(interleaved, micro_batches, grad, observer)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], take_output: Callable[[torch.Tensor], None] = lambda y: None
    ) -> list[torch.Tensor]:
        """The micro-batches' losses without gradients, if this process has the last layer; else nothing.

        Args:
            take_output: takes each output of the last layer.
        """

        def to_loss(y: torch.Tensor, fields: Fields) -> torch.Tensor:
            take_output(y)
            return self._loss_of(y, fields)

        return self._run(forward_only, micro_batches, None, None, to_loss)

    @torch.no_grad()
    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The last layer's output for each micro-batch, if this process has that layer; else nothing.

        Neither gradients nor losses are computed.
        """
        return self._run(forward_only, micro_batches, None, None, to_loss=lambda y, fields: y)

    def _run(
        self,
        order: Callable[[int, int, int, int], Iterator[Action]],
        micro_batches: Sequence[MicroBatch],
        grad: torch.Tensor | None,
        observer: Observer | None,
        to_loss: Callable[[torch.Tensor, Fields], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        count = len(micro_batches)
        if self.auxiliary.names:
            self.auxiliary.begin(count, grad)
        runtime = Runtime(
            self.stages_here,
            self.stage,
            self.num_stages,
            self._transport,
            self._boundary,
            to_loss or self._loss_of,
            micro_batches,
            grad,
            observer or Observer(),
        )
        runtime.run(instructions(order, self.stage, self.num_stages, count, self.num_virtual_stages))
        return runtime.losses

    def _loss_of(self, y: torch.Tensor, fields: Fields) -> torch.Tensor:
        """A micro-batch's loss, from the last layer's output."""
        return y


@dataclass
class Runtime:
    """One pass over a global batch's micro-batches.

    Args:
        virtual_stages: this process's virtual stages, numbers ``stage``, ``stage + num_stages``, ... of the model.
        stage, num_stages: this process's position on the pipeline axis, and that axis's size.
        transport: ``None`` without a pipeline.
        boundary: shape and dtype of the tensors between stages.
        loss_fn: (last layer's output, fields) -> scalar.
        micro_batches: (input, fields) of each; every process has all of them.
        grad: scalar, incoming gradient of each micro-batch's loss; ``None``: 1.
        observer: is called around the passes.

    Attributes:
        losses: of the micro-batches, in the order of computation, if this process has the last layer.
    """

    virtual_stages: Sequence[Stage]
    stage: int
    num_stages: int
    transport: Transport | None
    boundary: Boundary
    loss_fn: Callable[[torch.Tensor, Fields], torch.Tensor]
    micro_batches: Sequence[MicroBatch]
    grad: torch.Tensor | None = None
    observer: Observer = field(default_factory=Observer)
    losses: list[torch.Tensor] = field(default_factory=list)
    _arriving: dict[tuple[str, int, int], Arrival] = field(default_factory=dict)
    _alive: dict[tuple[int, int], tuple[torch.Tensor, _Received | None]] = field(default_factory=dict)
    _leaving: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def run(self, instructions: Iterable[Any]) -> None:
        """Execute the instructions in their order. Transfers do not wait; a computation waits for its input."""
        do: dict[type, Callable[[int, int], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            ReceiveForward: lambda m, c: self._receive("activation", m, c),
            ReceiveBackward: lambda m, c: self._receive("gradient", m, c),
            SendForward: lambda m, c: self._send("activation", m, c),
            SendBackward: lambda m, c: self._send("gradient", m, c),
        }
        for instruction in instructions:
            do[type(instruction)](instruction.micro_batch, instruction.virtual_stage)
        if self.transport is not None:
            self.transport.flush()

    def _number(self, virtual_stage: int) -> int:
        return virtual_stage * self.num_stages + self.stage

    def _forward(self, micro_batch: int, virtual_stage: int) -> None:
        x, fields = self.micro_batches[micro_batch]
        received = None
        if self._number(virtual_stage) > 0:
            x = self._arriving.pop(("activation", micro_batch, virtual_stage)).take()
            received = _Received(x.shape, x.dtype, x.device)
            if torch.is_grad_enabled() and x.is_floating_point():
                x = _Entrance.apply(received.anchor, x, received)
        self.observer.before_forward(micro_batch, virtual_stage)
        y = self.virtual_stages[virtual_stage](x, fields)
        if self._number(virtual_stage) == len(self.virtual_stages) * self.num_stages - 1:
            y = self.loss_fn(y, fields)
            self.losses.append(y.detach())
        else:
            self._leaving["activation", micro_batch, virtual_stage] = y.detach()
            # Free the values, unless others own them: autograd needs ``y`` as a node of the graph only.
            if y.requires_grad and not y.is_leaf and y._base is None:
                y.data = y.new_empty(1).expand(y.shape)
        if torch.is_grad_enabled():
            self._alive[micro_batch, virtual_stage] = (y, received)

    def _backward(self, micro_batch: int, virtual_stage: int) -> None:
        y, received = self._alive.pop((micro_batch, virtual_stage))
        arriving = self._arriving.pop(("gradient", micro_batch, virtual_stage), None)
        grad = self.grad if arriving is None else arriving.take()
        self.observer.before_backward(micro_batch, virtual_stage, y)
        if y.requires_grad:  # it does not if this and all earlier stages have no parameters
            torch.autograd.backward(y, grad)
        self.observer.after_backward(micro_batch, virtual_stage)
        if received is not None:
            self._leaving["gradient", micro_batch, virtual_stage] = received.gradient()

    def _receive(self, what: str, micro_batch: int, virtual_stage: int) -> None:
        assert self.transport is not None
        links = self.transport.links
        link = links.activations_in if what == "activation" else links.gradients_in
        x, fields = self.micro_batches[micro_batch]
        sender = self._number(virtual_stage) - (what == "activation")  # a gradient has the shape of this stage's output
        shape, dtype = self.boundary(sender, x, fields)
        self._arriving[what, micro_batch, virtual_stage] = Arrival(link, shape, dtype, x.device)

    def _send(self, what: str, micro_batch: int, virtual_stage: int) -> None:
        assert self.transport is not None
        links = self.transport.links
        link = links.activations_out if what == "activation" else links.gradients_out
        self.transport.send(link, self._leaving.pop((what, micro_batch, virtual_stage)))


class _Received:
    """What the gradient of a received input needs: its shape, dtype and device, not its values."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self._how: dict[str, Any] = {"size": shape, "dtype": dtype, "device": device}
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.grad: torch.Tensor | None = None

    def gradient(self) -> torch.Tensor:
        """Zeros if the stage's output does not depend on the input."""
        return torch.zeros(**self._how) if self.grad is None else self.grad


class _Entrance(torch.autograd.Function):
    """Makes a received input a non-leaf: autograd then frees it after its last use.

    A leaf would live until its gradient exists. Where the stage's first layers are recomputed, and their input is kept
    on the host, the device keeps none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, received: _Received) -> torch.Tensor:
        ctx.received = received
        return x.data  # no view, so that the first layer may work in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.received.grad = grad
        return None, None, None


class Arrival:
    """A tensor that is being received."""

    def __init__(self, link: Link, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self._tensor = torch.empty(shape, dtype=dtype, device=device)
        self._work = dist.irecv(self._tensor, link.peer, group=link.group)

    def take(self) -> torch.Tensor:
        """The tensor. On a GPU later work of the current stream waits for its arrival, not the host."""
        assert self._work is not None
        self._work.wait()
        return self._tensor


class Transport:
    """Sends tensors without waiting, and keeps each alive until it is sent."""

    def __init__(self, links: Links):
        self.links = links
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, link: Link, tensor: torch.Tensor) -> None:
        """Start sending."""
        tensor = tensor.contiguous()
        self._leaving.append((dist.isend(tensor, link.peer, group=link.group), tensor))
        # While a step is recorded, nothing is sent, so no send is complete.
        recording = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        while tensor.is_cuda and not recording and self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def flush(self) -> None:
        """Wait for all sends. On a GPU the current stream waits, not the host."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
