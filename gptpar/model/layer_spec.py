"""``LayerSpec`` describes one layer of a model, which is built only where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gptpar.tensor_parallel.cost import BatchShape, Cost

CostOf = Callable[[Any, BatchShape], Cost]
"""A function of a layer and a micro-batch's shape."""


class LayerSpec:
    """How to build one layer, without building it.

    Args:
        cls: the layer's class, a subclass of ``nn.Module``.
        *args: the class's positional arguments.
        name: the layer's global name, the same on every stage and in every checkpoint; parameters are called
            ``name.parameter``.
        batch_fields: fields of the micro-batch that the layer needs beside its input; it is called as
            ``layer(x, *fields)``. They never travel between stages, because every stage can read the data.
        auxiliary_losses: names of scalars that training adds to the loss; the layer returns them beside its output,
            as ``(output, {name: scalar})`` (:mod:`gptpar.pipeline.auxiliary_losses`).
        **kwargs: the class's keyword arguments.

    Raises:
        TypeError: ``cls`` is not a module class.
    """

    cost_fn: CostOf | None = None

    def __init__(
        self,
        cls: type[nn.Module],
        *args: Any,
        name: str = "",
        batch_fields: tuple[str, ...] = (),
        auxiliary_losses: tuple[str, ...] = (),
        **kwargs: Any,
    ):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"a LayerSpec takes a subclass of torch.nn.Module, not {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.name = name
        self.batch_fields = batch_fields
        self.auxiliary_losses = auxiliary_losses

    def build(self) -> nn.Module:
        """Construct the layer."""
        return self.cls(*self.args, **self.kwargs)

    def builds_the_same(self, other: LayerSpec) -> bool:
        """Whether both build equal layers with equal costs; their names may differ."""
        ours, theirs = ((one.cls, one.args, one.kwargs, one.cost_fn) for one in (self, other))
        return ours == theirs

    def cost(self, layer: nn.Module, batch: BatchShape) -> Cost:
        """The cost of the built layer, from its method ``cost``."""
        return (self.cost_fn or type(layer).cost)(layer, batch)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__}, name={self.name!r})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with all other specs of the same key.

    Args:
        key: names the shared module.
        forward_fn: called as ``forward_fn(module, x, *fields)`` instead of the module itself.
        cost_fn: what that call costs, instead of the module's method ``cost``.
    """

    def __init__(
        self,
        key: str,
        cls: type[nn.Module],
        *args: Any,
        forward_fn: Callable[..., Any] | None = None,
        cost_fn: CostOf | None = None,
        **kwargs: Any,
    ):
        super().__init__(cls, *args, **kwargs)
        self.key = key
        self.forward_fn, self.cost_fn = forward_fn, cost_fn


def build_on_meta(spec: LayerSpec) -> nn.Module:
    """Build the layer on torch's meta device: parameters have shapes and no memory."""
    with torch.device("meta"):
        return spec.build()
