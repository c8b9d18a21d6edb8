"""Executes a schedule's instructions on the stages of one process, and sends tensors between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gptpar.pipeline.schedules import (
    Backward,
    Forward,
    ReceiveBackward,
    ReceiveForward,
    SendBackward,
    SendForward,
)
from gptpar.pipeline.stage import Fields, Stage
from gptpar.topology.groups import Link, Links

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
