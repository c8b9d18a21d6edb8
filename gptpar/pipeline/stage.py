"""The layers that one process runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.init import Init, inits_of
from gptpar.layer_spec import LayerSpec, TiedLayerSpec


class Stage(nn.Module):
    """A run of consecutive layers, called one after the other.

    Layers are built without storage (on the meta device): whoever owns the parameters gives them memory and values.

    Args:
        specs: the layers of this stage, in order.
        recompute: names of the layers whose activations are computed again in the backward pass.
    """

    def __init__(self, specs: Sequence[LayerSpec], *, recompute: frozenset[str] = frozenset()):
        super().__init__()
        self.specs = list(specs)
        self.recompute = recompute
        self.layers = nn.ModuleList()
        self._names: list[str] = []
        tied: dict[str, nn.Module] = {}
        self._calls: list[tuple[Callable[..., Any], tuple[str, ...], bool]] = []
        for spec in self.specs:
            shared = tied.get(spec.key) if isinstance(spec, TiedLayerSpec) else None
            if shared is None:
                with torch.device("meta"):
                    layer = spec.build()
                self.layers.append(layer)
                self._names.append(spec.name)
            else:
                layer = shared
            if isinstance(spec, TiedLayerSpec):
                tied[spec.key] = layer
            call: Callable[..., Any] = layer
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
                call = partial(spec.forward_fn, layer)
            self._calls.append((call, spec.batch_fields, spec.name in recompute))

    def forward(self, x: torch.Tensor, fields: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Run the layers.

        Args:
            x: the stage's input: tokens_BS on the first stage, hidden states_BSD on others.
            fields: the micro-batch's other tensors by name; a field that is absent is passed as ``None``.
        """
        for call, names, recompute in self._calls:
            args = [fields.get(name) for name in names]
            if recompute and torch.is_grad_enabled():
                x = checkpoint(call, x, *args, use_reentrant=False)
            else:
                x = call(x, *args)
        return x

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Global name -> parameter, in forward order, tied parameters once."""
        return {
            f"{name}.{local}": parameter
            for name, layer in zip(self._names, self.layers, strict=True)
            for local, parameter in layer.named_parameters()
        }

    def global_inits(self) -> dict[str, Init]:
        """Global name -> how the parameter is initialised."""
        return {
            f"{name}.{local}": init
            for name, layer in zip(self._names, self.layers, strict=True)
            for local, init in inits_of(layer).items()
        }

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        """Give every parameter the memory it lives in.

        Args:
            storage: global name -> tensor of the parameter's shape; it becomes the parameter's own memory.
        """
        for name, layer in zip(self._names, self.layers, strict=True):
            for prefix, module in layer.named_modules(prefix=name):
                for local, _ in list(module.named_parameters(recurse=False)):
                    module.register_parameter(local, nn.Parameter(storage[f"{prefix}.{local}"]))

    def compile_layers(self, kind: type[nn.Module]) -> None:
        """Compile each layer of a kind by itself: compile time does not grow with depth."""
        for layer in self.layers:
            if isinstance(layer, kind):
                layer.compile()
