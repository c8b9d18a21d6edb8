"""Submits a part of a tied weight's gradient to the CPU optimizer before the gradient is final.

A weight that is embedding and LM head at once gets its gradient as LM head at the beginning of the backward pass, and
as embedding at its end; the next forward pass needs it first. So the CPU optimizer gets the LM head's part at once
("partial gradient") and updates with it while the device works on the other layers. Nobody knows how a user's module
uses its weights: when the gradient is final, the device compares it with the partial one, and the rows that differ are
computed again. (:mod:`gptpar.offload.tied_embedding` does the same for our GPT, whose tokens say in advance which rows
will differ.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from gptpar.adapter.module_stage import ModuleStage
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.placed import PlacedParameters
from gptpar.engine.engine import Engine
from gptpar.engine.table import ParameterTable
from gptpar.engine.tensors import tensors_in
from gptpar.engine.units import Unit
from gptpar.offload.host_optimizer import HostOptimizer

Node = torch.autograd.graph.Node

MAX_NODES = 64
"""Number of autograd nodes of a module that are searched for the weight; a linear layer has at most five."""


def tied_unit(stage: PlacedParameters, table: ParameterTable, options: EngineOptions, world: int) -> Unit | None:
    """The largest unit that is one weight of an embedding and of another module, if its partial gradient can be used.

    It can if there is one process (nothing is summed) and the weight is on the device.

    Args:
        stage: the module; layers of a pipeline have no such unit.
        table: of its trained parameters.
        world: number of processes.
    """
    if world > 1 or options.offload.cpu_parameters or options.offload.offload_speculation == "off":
        return None
    if not isinstance(stage, ModuleStage):
        return None
    offloaded = (unit for unit in table.units if table.on_device[unit.name] < unit.length)
    tied = [unit for unit in offloaded if _is_one_matrix(unit) and _is_tied(stage, *unit.params)]
    return max(tied, key=lambda unit: unit.length, default=None)


def _is_one_matrix(unit: Unit) -> bool:
    params = list(unit.params.values())
    if len(params) > 1 or params[0].stop < unit.length:
        return False
    return len(params[0].shape) == 2 and params[0].info.strides is None


def _is_tied(stage: ModuleStage, name: str) -> bool:
    embeddings = [isinstance(user, nn.Embedding) for user in _users_of(stage, name)]
    return any(embeddings) and not all(embeddings)


def _users_of(stage: ModuleStage, name: str) -> Iterator[nn.Module]:
    """The modules that have a parameter under any name."""
    parameter = stage.parameters[name]
    return (user for user in stage.module.modules() if any(own is parameter for own in user._parameters.values()))


class TiedWeight:
    """Collects the gradients of a tied weight from all modules but embeddings, and submits their sum.

    Args:
        unit: see :func:`tied_unit`.
        stage: the module, whose undo list gets the hooks.
        engine: of the module.
        host: updates the unit.
    """

    def __init__(self, unit: Unit, stage: ModuleStage, engine: Engine, host: HostOptimizer):
        (name,) = unit.params
        self._unit, self._engine, self._host = unit, engine, host
        self._weight = stage.parameters[name]
        self._on_device = engine.gradients.memory.shards[unit.name].numel()
        self._memory = torch.empty(0)
        self._expected = self._taken = 0
        self._is_last = False
        host.compare_partial(unit.name, self._weight.shape[1], self._on_device)
        for user in _users_of(stage, name):
            if not isinstance(user, nn.Embedding):
                watch = torch._dynamo.disable(self._watch)
                stage.undo.callback(user.register_forward_hook(watch, with_kwargs=True).remove)

    @staticmethod
    def of(stage: ModuleStage, engine: Engine, host: HostOptimizer | None) -> TiedWeight | None:
        """The tied weight for whose partial gradient the CPU optimizer is prepared, if there is one."""
        units = [unit for unit in engine.table.units if host is not None and unit.name == host.partial_unit]
        return TiedWeight(units[0], stage, engine, host) if units and host is not None else None

    def begin_backward(self, *, last: bool) -> None:
        """A backward pass begins; ``last``: the step's gradient is final afterwards."""
        self._is_last = last

    def end_backward(self) -> None:
        """The backward pass is over; uses whose gradient it did not compute are forgotten."""
        self._is_last, self._expected, self._taken = False, 0, 0

    def _watch(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Take the gradient from the nodes of a module's call that pass it to the weight."""
        for node, place in edges_to(self._weight, output, (args, kwargs)):
            self._expected += 1
            node.register_hook(partial(self._take, place))

    @torch.no_grad()
    def _take(self, place: int, grads: tuple[torch.Tensor | None, ...], _: Any) -> None:
        grad = grads[place]
        if not self._is_last or grad is None:
            return
        memory, low = self._engine.gradients.memory, self._on_device
        part, is_first = grad.reshape(-1)[low:], not self._taken
        self._taken += 1
        if self._memory.shape != part.shape or self._memory.dtype != memory.dtype_of(self._unit):
            self._memory = torch.empty_like(part, dtype=memory.dtype_of(self._unit))
        if not is_first:
            self._memory.add_(part)
        elif memory.single:
            self._memory.copy_(part)
        else:  # earlier micro-batches' sum, to which autograd has not added this one's gradient yet
            torch.add(memory.sum_of(self._unit)[low:], part, out=self._memory)
        if self._taken == self._expected:
            submit = partial(self._host.submit_gradient, self._unit.name, self._memory, formed=self._memory.numel())
            self._engine.graph_breaks.at(submit)


def edges_to(weight: torch.Tensor, output: Any, inputs: Any) -> list[tuple[Node, int]]:
    """(node, position among its next ones) of each autograd node of a call that passes a gradient straight to a leaf.

    Args:
        output: of the call, nested.
        inputs: of the call, nested: the nodes that made them are not of the call.
    """
    nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    known = {tensor.grad_fn for tensor in tensors_in(inputs)}
    found = []
    while nodes and len(known) < MAX_NODES:
        node = nodes.pop()
        if node in known:
            continue
        known.add(node)
        for place, (following, _) in enumerate(node.next_functions):
            if getattr(following, "variable", None) is weight:
                found.append((node, place))
            elif following is not None:
                nodes.append(following)
    return found
