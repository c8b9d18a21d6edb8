"""Finds shapes and dtypes between layers without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gptpar.adapter.built_layers import BuiltLayer, BuiltTiedLayer, FunctionLayer
from gptpar.model.layer_spec import LayerSpec, build_on_meta
from gptpar.pipeline.stage import Fields, Stage

Outputs = list[tuple[torch.Size, torch.dtype]]


class AbstractRun:
    """Finds the shape and dtype of each layer's output by running all layers on tensors without data.

    Args:
        specs: of all layers.

    Attributes:
        dtype: of the layers' floating-point parameters; ``None``: as they are built.
    """

    def __init__(self, specs: Sequence[LayerSpec]):
        self.dtype: torch.dtype | None = None
        self._specs, self._found = specs, dict[Any, Outputs]()

    def __call__(self, x: torch.Tensor, fields: Fields) -> Outputs:
        """(shape, dtype) of each layer's output for this input of the first one."""
        key = x.shape, x.dtype, self.dtype
        if key not in self._found:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self._found[key] = self._run(x.to("meta"), fields)
        return self._found[key]

    def _run(self, x: torch.Tensor, fields: Fields) -> Outputs:
        on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in fields.items()}
        outputs: Outputs = []
        tied: dict[str, nn.Module] = {}
        for spec in self._specs:
            if issubclass(spec.cls, FunctionLayer):
                with torch._C.DisableTorchFunctionSubclass(), _OnMeta(self._cast):  # no guard of their values matters
                    x = _function_of(spec)(x)
            elif isinstance(spec, BuiltLayer):
                x = self._call_built(spec, x, on_meta)
            else:
                x = Stage([spec], build=self._without_data, tied=tied)(x, on_meta)
            outputs.append((x.shape, x.dtype))
        return outputs

    def _without_data(self, spec: LayerSpec) -> nn.Module:
        layer = build_on_meta(spec)
        for parameter in layer.parameters():
            parameter.data = self._cast(parameter.data)
        return layer

    def _call_built(self, spec: BuiltLayer, x: torch.Tensor, fields: Fields) -> torch.Tensor:
        """Call a layer that exists, without copying its memory or its hooks."""
        tensors: dict[str, torch.Tensor] = dict(spec.module.named_parameters())
        values = {name: self._cast(torch.empty_like(tensor, device="meta")) for name, tensor in tensors.items()}
        values |= {name: torch.empty_like(buffer, device="meta") for name, buffer in spec.module.named_buffers()}
        return functional_call(spec.module, values, (x, *(fields.get(name) for name in spec.batch_fields)))

    def _cast(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self.dtype is None or not parameter.is_floating_point() else parameter.to(self.dtype)


def _function_of(spec: LayerSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(spec, BuiltTiedLayer) and spec.function is not None:
        return spec.function
    return cast(FunctionLayer, spec.module).function if isinstance(spec, BuiltLayer) else spec.args[0]


class _OnMeta(TorchDispatchMode):
    """Lets operators see tensors without data in place of parameters, and of all that meet a tensor without data.

    Args:
        cast: gives a parameter without data its number format.
    """

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self._cast = cast

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        given = tree_map_only(nn.Parameter, lambda one: self._cast(torch.empty_like(one, device="meta")), given)
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in tree_leaves(given)):
            given = tree_map_only(torch.Tensor, lambda one: one.to("meta"), given)
        return func(*given[0], **given[1])
