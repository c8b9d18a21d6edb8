"""Lets linear layers form their weights' gradients in the gradient sums, without a second pass over memory.

Without this, a product writes a micro-batch's gradient to new memory, and the collector copies or adds it to the
unit's sum. There are two shorter ways. Where nothing is added, the backward pass of a layer's own operator asks for the
place in the sum, and writes there; plain products, which the compiler joins with what follows, do not ask. With
``--gradient-accumulation-fusion``, a layer gets the sum before each call, and the product itself adds to it. The
gradient of a scalar then calls the collector, so that it counts and orders these parameters like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from weakref import WeakValueDictionary

import torch

from gptpar.engine.collector import GradientCollector
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.engine.units import Unit
from gptpar.tensor_parallel.layers import SplitLinear
from gptpar.tensor_parallel.linear_ops import PLACES, where

MIN_ELEMENTS = 1 << 20
"""Of a weight whose gradient is formed in its place: copying a smaller one takes less time than asking for it."""


class GradientPlaces:
    """Gives linear layers the places of their weights' gradients, where a sum has the gradients' number format.

    Args:
        gradients: have the places.
        parameters: global name -> parameter in its memory.
        linears: global name of a weight -> the layer.
    """

    def __init__(
        self, gradients: GradientCollector, parameters: Mapping[str, torch.Tensor], linears: Mapping[str, SplitLinear]
    ):
        self._places: list[Callable[[], torch.Tensor | None]] = []  # ``PLACES`` has weak references
        memory = gradients.memory
        names = {name for unit in memory.table.units if memory.is_narrow(unit) for name in unit.params}
        for name in names & linears.keys():
            if parameters[name].numel() >= MIN_ELEMENTS:
                self._places.append(partial(gradients.place_of, name))
                PLACES[where(parameters[name])] = self._places[-1]


class FusedSums:
    """Gives linear layers the gradient sums of their weights, in steps of several micro-batches.

    A sum is set to zero before a layer's first call in a step. By then nobody reads the last step's sum, because the
    gatherer has waited for the update of the layer's parameters.

    Args:
        gradients: have the sums, and keep those of all units with such a layer whole over micro-batches.
        linears: global name of a weight -> the layer that can add its gradient to a sum.
    """

    def __init__(
        self,
        gradients: GradientCollector,
        gatherer: ParameterGatherer,
        linears: Mapping[str, SplitLinear],
    ):
        self._memory = memory = gradients.memory
        # Weak references: a scalar's hook leads from its layer to here, a cycle that Python cannot find in autograd.
        self._of_layer: dict[str, list[tuple[Unit, WeakValueDictionary[str, SplitLinear]]]] = {}
        self._begun: set[str] = set()
        for unit in memory.table.units:
            found = WeakValueDictionary({name: linears[name] for name in unit.params if name in linears})
            if found:
                assert unit.name in memory.kept_whole, f"the sum of {unit.name} does not last"
                self._of_layer.setdefault(gatherer.layer_of(unit.name), []).append((unit, found))
            for name, linear in found.items():
                linear.added = torch.zeros_like(memory.shard.sum(), requires_grad=True)
                gradients.watch_added(name, linear.added)
        gatherer.on_call = self._give

    def begin(self) -> None:
        """Begin a step."""
        self._begun.clear()

    def _give(self, layer: str) -> None:
        """Give a layer, whose forward pass begins, the sums of its weights."""
        for unit, linears in self._of_layer.get(layer, ()) if torch.is_grad_enabled() else ():
            views = {} if self._memory.single else self._memory.views_of(unit)
            if views and unit.name not in self._begun:
                self._begun.add(unit.name)
                torch._foreach_zero_([views[name] for name in linears])
            for name, linear in linears.items():
                # A new tensor for each call: autograd must not count the other micro-batches' changes of the sum.
                linear.gradient_sum = views[name].data.flatten(0, -2) if views else None
