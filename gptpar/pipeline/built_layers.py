"""Layers of a pipeline that are not specifications: functions, and modules that exist already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gptpar.model.layer_spec import LayerSpec


class FunctionLayer(nn.Module):
    """A plain function as a layer.

    Attributes:
        function: input -> output.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

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
