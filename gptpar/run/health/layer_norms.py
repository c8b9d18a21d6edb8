"""The norms of each layer's output, gradient, update and weights: the same numbers in every layout.

Each process adds up the squares of the elements that it counts of each layer, and the sums of all processes are added.
So neither the layout nor the twin-flow ratio changes a norm, up to the order of the sum. Norms are measured at an
interval, or after an outlier, because measuring waits for the device. All processes take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gptpar.engine.engine import Engine
from gptpar.optim.grad_norm import square_of
from gptpar.pipeline.stage import LayerCaller, Stage
from gptpar.topology.groups import Topology

Norms = dict[str, float]
"""Layer's name -> norm."""

OldWeights = dict[str, list[torch.Tensor]]
"""Parameter's name -> copies, in host memory, of this process's parts."""

ACTIVATION, GRADIENT, UPDATE, WEIGHTS = "activation-rms", "grad-norm", "update-norm", "weight-norm"
"""The kinds of norms; in logs a slash and the layer's name follow."""

MIN_HIDDEN_DIMS = 2
"""Fewest dims of hidden states; an output with fewer dims is the last layer's loss."""


class LayerNorms:
    """Measures the layers of a model that is spread over processes.

    Args:
        stages: the layers that this process calls.
    """

    def __init__(self, engine: Engine, stages: Sequence[Stage], topology: Topology):
        self._engine, self._stages, self._topology = engine, stages, topology
        self._unit_of = {one.param: one.unit for one in engine.table.ranges() if one.counted}

    def of_outputs(self, forward: Callable[[], object]) -> Norms:
        """The root of the mean square of each layer's output.

        Args:
            forward: calls the layers, without gradients.
        """
        found: dict[str, list[torch.Tensor]] = {}
        with self._watched(found):
            forward()
        mine = {name: (float(sum(squares[::2])), float(sum(squares[1::2]))) for name, squares in found.items()}
        sums: dict[str, tuple[float, float]] = {}
        for process in self._topology.of_all(mine):
            for name, (square, count) in process.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + square, before[1] + count
        return {name: math.sqrt(square / count) for name, (square, count) in sums.items()}

    @contextmanager
    def _watched(self, found: dict[str, list[torch.Tensor]]) -> Iterator[None]:
        callers = [stage.caller for stage in self._stages]
        for stage in self._stages:
            stage.call_through(_Watching(stage.caller, found))
        try:
            yield
        finally:
            for stage, caller in zip(self._stages, callers, strict=True):
                stage.call_through(caller)

    def of_gradients(self, squares: Sequence[float], loss_scale: float) -> Norms:
        """The norm of each layer's gradient, before clipping.

        Args:
            squares: as the reducer's ``squares`` gave them in the step.
            loss_scale: a factor in the gradient.
        """
        mine = dict(zip((unit.name for unit in self._engine.table.units), squares, strict=True))
        return {name: norm / loss_scale for name, norm in self._norms(mine).items()}

    def old_weights(self) -> OldWeights:
        """A copy of the master weights that this process counts, for :meth:`of_update`."""
        return {name: [part.to("cpu", copy=True) for part in parts] for name, parts in self._parts()}

    def of_update(self, old: OldWeights) -> Norms:
        """The norm of each layer's change since ``old``, after the update of all its elements."""
        pairs = (
            (name, [part - before.to(part.device) for part, before in zip(parts, old[name], strict=True)])
            for name, parts in self._parts()
        )
        return self._of_parameters(pairs)

    def of_weights(self) -> Norms:
        """The norm of each layer's master weights."""
        return self._of_parameters(self._parts())

    def _parts(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """The parts of parameters that this process counts, on device and host, after the last step."""
        for name, parts in self._engine.optimizer.parts("weights").items():
            if name in self._unit_of:
                yield name, [part.reshape(-1) for _, part in parts.parts]

    def _of_parameters(self, parts: Iterator[tuple[str, list[torch.Tensor]]]) -> Norms:
        squares: dict[str, float] = {}
        for name, vectors in parts:
            unit = self._unit_of[name]
            here = sum(square_of([vector], vector.device).item() for vector in vectors)
            squares[unit] = squares.get(unit, 0.0) + here
        return self._norms(squares)

    def _norms(self, squares: Mapping[str, float]) -> Norms:
        """Layer -> root of the sum of all processes' squares."""
        sums: Norms = {}
        for process in self._topology.of_all(dict(squares)):
            for name, square in process.items():
                sums[name] = sums.get(name, 0.0) + square
        return {name: math.sqrt(square) for name, square in sums.items()}


class _Watching:
    """Calls layers through another caller, and notes the squares and sizes of their outputs."""

    def __init__(self, caller: LayerCaller, found: dict[str, list[Any]]):
        self._caller, self._found = caller, found

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        y = self._caller(name, call, x, *args)
        if y.dim() >= MIN_HIDDEN_DIMS:
            self._found.setdefault(name, []).extend([square_of([y.reshape(-1)], y.device), y.numel()])
        return y
