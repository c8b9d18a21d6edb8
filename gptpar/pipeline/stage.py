"""A (virtual) stage: consecutive layers that one process runs in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import nn

from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec, build_on_meta
from gptpar.pipeline.auxiliary_losses import AuxiliaryLosses
from gptpar.pipeline.host_activations import HostActivations
from gptpar.pipeline.recompute import Keep, recomputed
from gptpar.system.compile_cache import refuse_others_compile_cache
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.topology.mesh import COPIES
from gptpar.topology.placement import ParameterInfo, declared_by

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class BufferInfo:
    """Shape and dtype of a layer's buffer."""

    shape: torch.Size
    dtype: torch.dtype


class LayerCaller(Protocol):
    """Calls a layer; it may gather the layer's parameters first."""

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Returns ``call(x, *args)``."""


def call_directly(name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call a layer whose parameters are always in place."""
    return call(x, *args)


@dataclass(frozen=True)
class _Call:
    name: str
    run: Callable[..., Any]
    fields: tuple[str, ...]


class Stage(nn.Module):
    """A (virtual) stage of a pipeline: consecutive layers.

    Args:
        specs: the layers of this stage, in order.
        build: makes a layer from its specification; by default without storage (on the meta device), so that the owner
            of the parameters can give them memory and values.
        recompute: groups of consecutive layers' names; a group's activations are freed, and computed again in the
            backward pass.
        keep: how the inputs of such groups are kept.
        on_host: names of further layers whose saved tensors ``keep.host`` keeps.
        tied: key -> module that other virtual stages of this process share; new ones are added.
        auxiliary: takes the layers' auxiliary losses.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        build: Callable[[LayerSpec], nn.Module] | None = None,
        recompute: Sequence[tuple[str, ...]] = (),
        keep: Keep | None = None,
        on_host: Collection[str] = (),
        tied: dict[str, nn.Module] | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ):
        super().__init__()
        self.specs = list(specs)
        self.caller: LayerCaller = call_directly
        self.layers = nn.ModuleList()
        self._keep = keep or Keep()
        auxiliary = auxiliary or AuxiliaryLosses()
        self._names: list[str] = []
        tied = {} if tied is None else tied
        calls: list[_Call] = []
        for spec in self.specs:
            layer = _layer_of(spec, build or build_on_meta, tied)
            if spec.name not in self._names:
                self.layers.append(layer)
                self._names.append(spec.name)
            calls.append(_call_of(spec, layer, auxiliary, self._keep.host if spec.name in on_host else None))
        group_of = {name: number for number, names in enumerate(recompute) for name in names}
        self._segments = [
            (list(run), number is not None) for number, run in groupby(calls, key=lambda call: group_of.get(call.name))
        ]

    def forward(self, x: torch.Tensor, fields: Fields) -> torch.Tensor:
        """Run the layers.

        Args:
            x: the stage's input: tokens [B, S] on the first stage of a GPT, hidden states [N, D] on others.
            fields: the micro-batch's other values by name; a missing one is passed to layers as ``None``.
        """
        if self._keep.host is not None:
            self._keep.host.begin_pass()
        for calls, recompute in self._segments:
            if recompute and torch.is_grad_enabled():
                x = recomputed(partial(self._run, calls, fields), x, keep=self._keep)
            else:
                x = self._run(calls, fields, x)
        return x

    def _run(self, calls: Sequence[_Call], fields: Fields, x: torch.Tensor) -> torch.Tensor:
        for call in calls:
            x = self.caller(call.name, call.run, x, *(fields.get(name) for name in call.fields))
        return x

    def call_through(self, caller: LayerCaller) -> None:
        """Let ``caller`` call the layers from now on."""
        self.caller = caller

    def call_order(self) -> list[str]:
        """Layers' names in the order of their calls in the forward pass; a tied one may occur twice."""
        return [call.name for calls, _ in self._segments for call in calls]

    def layers_by_name(self) -> dict[str, nn.Module]:
        """Name -> layer, in forward order; a tied one occurs once."""
        return dict(zip(self._names, self.layers, strict=True))

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Global name -> parameter, in forward order, tied parameters once."""
        return {name: parameter for layer in self.parameters_by_layer().values() for name, parameter in layer.items()}

    def parameters_by_layer(self) -> dict[str, dict[str, nn.Parameter]]:
        """Layer's name -> global name -> parameter, for layers that have any."""
        found = {
            name: {f"{name}.{local}": parameter for local, parameter in layer.named_parameters()}
            for name, layer in zip(self._names, self.layers, strict=True)
        }
        return {name: parameters for name, parameters in found.items() if parameters}

    def units_by_layer(self) -> dict[str, tuple[str, ...]]:
        """Layer's name -> its units, for layers that have parameters.

        Parameters whose copies are on the same ranks are one unit. A layer's unit has the layer's name, and one with
        copies on other axes also theirs.
        """
        return {name: tuple(units) for name, units in self._units.items()}

    def lookups(self) -> list[str]:
        """Layers that only look rows up: their backward pass reads no parameter."""
        names = [spec.name for spec in self.specs]  # a tied embedding is called as the LM head, too
        return [
            spec.name
            for spec in self.specs
            if spec.cls is VocabParallelEmbedding
            and names.count(spec.name) == 1
            and not (isinstance(spec, TiedLayerSpec) and spec.forward_fn)
        ]

    def infos_by_unit(self) -> dict[str, dict[str, ParameterInfo]]:
        """Unit -> global name -> description of the parameter, both in forward order."""
        return {unit: infos for units in self._units.values() for unit, infos in units.items()}

    @cached_property
    def _units(self) -> dict[str, dict[str, dict[str, ParameterInfo]]]:
        infos = self.infos()
        found: dict[str, dict[str, dict[str, ParameterInfo]]] = {}
        for layer, parameters in self.parameters_by_layer().items():
            units = found[layer] = {}
            for name in parameters:
                axes = infos[name].placement.copies_over
                unit = layer if axes == COPIES else ".".join((layer, *axes))
                units.setdefault(unit, {})[name] = infos[name]
        return found

    def infos(self) -> dict[str, ParameterInfo]:
        """Global name -> description of the parameter.

        Raises:
            TypeError: a layer does not declare a parameter (:mod:`gptpar.topology.placement`).
        """
        found: dict[str, ParameterInfo] = {}
        for name, layer in zip(self._names, self.layers, strict=True):
            for local, spec in declared_by(layer, name).items():
                assert spec.init is not None and spec.placement is not None
                shape = layer.get_parameter(local).shape
                info = ParameterInfo(shape, spec.init, spec.placement, matrices=spec.matrices)
                found[f"{name}.{local}"] = info
        return found

    def buffer_infos(self) -> dict[str, BufferInfo]:
        """Global name -> description of the buffer.

        Raises:
            TypeError: a module was built without storage and cannot fill its buffers.
        """
        found: dict[str, BufferInfo] = {}
        for name, layer in zip(self._names, self.layers, strict=True):
            for prefix, module in layer.named_modules(prefix=name):
                buffers = dict(module.named_buffers(recurse=False))
                if any(buffer.is_meta for buffer in buffers.values()) and not hasattr(module, "reset_buffers"):
                    raise TypeError(
                        f"layer {name!r}: {type(module).__name__} has buffers {sorted(buffers)} and cannot fill them: "
                        "layers are built without memory and get it afterwards, so write a method reset_buffers() that "
                        "gives the module's own buffers their initial values, and call it in the constructor."
                    )
                for local, buffer in buffers.items():
                    inner = f"{prefix}.{local}".removeprefix(f"{name}.")
                    found[f"{name}.{inner}"] = BufferInfo(buffer.shape, buffer.dtype)
        return found

    def place(self, storage: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter, and every buffer without storage, to its memory, and fill those buffers.

        Args:
            storage: global name -> tensor of the parameter's or buffer's shape, which becomes its memory.
        """
        for name, layer in zip(self._names, self.layers, strict=True):
            for prefix, module in layer.named_modules(prefix=name):
                for local, parameter in module.named_parameters(recurse=False):
                    place_parameter(parameter, storage[f"{prefix}.{local}"])
                empty = [local for local, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
                for local in empty:
                    setattr(module, local, storage[f"{prefix}.{local}"])
                if empty:
                    cast(Any, module).reset_buffers()

    def compile_layers(self, names: Collection[str]) -> None:
        """Compile each of these layers by itself: compile time does not grow with depth."""
        if names:
            refuse_others_compile_cache()
        for name, layer in self.layers_by_name().items():
            if name in names:
                layer.compile()


def _layer_of(spec: LayerSpec, build: Callable[[LayerSpec], nn.Module], tied: dict[str, nn.Module]) -> nn.Module:
    """A new layer, or the tied one if it has been built already."""
    if not isinstance(spec, TiedLayerSpec):
        return build(spec)
    if spec.key not in tied:
        tied[spec.key] = build(spec)
    return tied[spec.key]


def _call_of(spec: LayerSpec, layer: nn.Module, auxiliary: AuxiliaryLosses, host: HostActivations | None) -> _Call:
    """The call of a layer at its place in the stage; ``host`` takes the tensors that it saves."""
    run: Callable[..., Any] = layer if host is None else partial(host.call, layer)
    if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
        run = partial(spec.forward_fn, layer)
    if spec.auxiliary_losses:
        run = partial(auxiliary.call, run, spec.auxiliary_losses)
    return _Call(spec.name, run, spec.batch_fields)


def place_parameter(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Point a parameter to this memory; the parameter remains the same object.

    Autograd does not see later writes to the memory as in-place changes of the parameter.
    """
    if parameter.is_meta:
        attributes = dict(vars(parameter))  # the user's, which would be swapped, too
        torch.utils.swap_tensors(parameter, nn.Parameter(memory.data, requires_grad=parameter.requires_grad))
        vars(parameter).update(attributes)
    else:
        parameter.data = memory.data


def memory_for(buffers: Mapping[str, BufferInfo], device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for :meth:`Stage.place`, without values."""
    return {name: torch.empty(info.shape, dtype=info.dtype, device=device) for name, info in buffers.items()}
