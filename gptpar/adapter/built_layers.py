"""Layers of a pipeline that are not specifications: modules that exist already, and functions that may use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from gptpar.adapter.modules_used import Used, modules_used, tensors_of
from gptpar.errors import ConfigError
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec

Function = Callable[[torch.Tensor], torch.Tensor]


class FunctionLayer(nn.Module):
    """A plain function as a layer.

    Args:
        function: input -> output.
        used: the modules and parameters that it uses, by name.
    """

    def __init__(self, function: Function, used: Mapping[str, Used] | None = None):
        super().__init__()
        self.function = function
        for name, one in (used or {}).items():
            setattr(self, name, one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class BuiltLayer(LayerSpec):
    """A layer that exists already.

    Attributes:
        module: the layer.
    """

    def __init__(self, module: nn.Module):
        super().__init__(type(module))
        self.module = module

    def build(self) -> nn.Module:
        return self.module


class BuiltTiedLayer(BuiltLayer, TiedLayerSpec):
    """A layer that exists already and whose parameters a function uses, or that function.

    Args:
        module: the layer.
        name: of the layer; the function has the same.
        function: uses its parameters; ``None``: this is the layer itself.
    """

    def __init__(self, module: nn.Module, name: str, function: Function | None = None):
        LayerSpec.__init__(self, type(module) if function is None else FunctionLayer, name=name)
        self.module, self.function = module, function
        self.key, self.forward_fn = name, None if function is None else lambda _, x: function(x)


def tie_functions(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The same layers, where functions that use a layer's parameters are tied to it.

    A function that uses parameters of no layer becomes the layer that has them.

    Raises:
        ConfigError: a function uses parameters of several layers.
    """
    found, owners = list(specs), _owners(specs)
    problems = []
    for place, spec in enumerate(specs):
        if not issubclass(spec.cls, FunctionLayer):
            continue
        function = spec.args[0]
        used = modules_used(function)
        tensors = [id(tensor) for one in used.values() for tensor in tensors_of(one)]
        owning = sorted({owners.get(tensor, -1) for tensor in tensors})
        if owning == [-1]:
            found[place] = BuiltLayer(FunctionLayer(function, used))
            found[place].name = spec.name
            owners |= dict.fromkeys(tensors, place)
        elif len(owning) == 1:
            owner = cast(BuiltLayer, found[owning[0]])
            if not isinstance(owner, BuiltTiedLayer):
                found[owning[0]] = BuiltTiedLayer(owner.module, owner.name)
            found[place] = BuiltTiedLayer(owner.module, owner.name, function)
        elif owning:
            names = ", ".join("no layer" if one < 0 else specs[one].name for one in owning)
            problems.append(_SEVERAL.format(spec.name, names))
    if problems:
        raise ConfigError(problems)
    return found


def _owners(specs: Sequence[LayerSpec]) -> dict[int, int]:
    """Identity of each tensor of layers that exist already -> the place of the first such layer."""
    placed = [(place, spec.module) for place, spec in enumerate(specs) if isinstance(spec, BuiltLayer)]
    return {id(tensor): place for place, module in reversed(placed) for tensor in tensors_of(module)}


_SEVERAL = (
    "{} is a function that uses parameters of several layers ({}): make it a layer that has them, or write "
    "TiedLayerSpec(key, ..., forward_fn=function) here and where the shared layer is."
)
