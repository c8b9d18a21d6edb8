"""The tensors of an engine as its checkpoints have them: parameters, moments, buffers, and modules' extra state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from gptpar.adapter.units import own, walk
from gptpar.checkpoint import Manifest
from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.deepspeed.engines.former_names import layers_in_order, stored_names
from gptpar.topology.tensor_parts import TensorParts, as_parts, named

Tensors = dict[str, torch.Tensor | TensorParts]


def with_extra_state(engine: EngineState) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of each module whose class defines ``get_extra_state``."""
    return (
        (path, one)
        for prefix, root in engine.weights.roots.items()
        for path, one in root.named_modules(prefix=prefix)
        if type(one).get_extra_state is not nn.Module.get_extra_state
    )


def tensors_of(engine: EngineState, *, with_moments: bool) -> Tensors:
    """This process's boxes of all parameters and moments: ``weights/NAME``, ``STATE/NAME``; views, not copies."""
    optimizer = engine.engine.optimizer
    moments = optimizer.state_tensors(kinds=optimizer.states) if with_moments else {}
    return {**named({"weights": engine.weights.parts(), **moments})}


def buffers_of(engine: EngineState) -> Tensors:
    """Persistent buffers, each under its first name; views, not copies; complex ones as pairs of numbers."""
    return {
        f"buffers/{name}": torch.view_as_real(buffer.data) if buffer.is_complex() else buffer.data
        for buffer, name in kept_buffers(engine).items()
    }


def kept_buffers(engine: EngineState) -> dict[torch.Tensor, str]:
    """Persistent buffer -> its first name."""
    found: dict[torch.Tensor, str] = {}
    for path, one, _ in chain.from_iterable(walk(root, prefix) for prefix, root in engine.weights.roots.items()):
        kept = {name: value for name, value in one._buffers.items() if name not in one._non_persistent_buffers_set}
        for name, buffer in own(path, kept):
            found.setdefault(buffer, name)
    return found


def is_in_reach(engine: EngineState, name: str) -> bool:
    """Whether the user's code may overwrite a tensor of a checkpoint at any time, and nobody would ask the save.

    These are buffers, frozen parameters that do not come and go, and parameters that are the master weights themselves.
    Of all others the engine notices changes, and takes them over by itself.
    """
    kind, _, parameter = name.partition("/")
    if kind == "weights":
        trained = parameter in engine.engine.table.params
        return engine.engine.masters_are_parameters if trained else not engine.engine.parameters.transient
    return kind in ("buffers", "client")


def is_frozen(engine: EngineState, name: str) -> bool:
    """Whether a tensor of a checkpoint is a frozen parameter."""
    kind, _, parameter = name.partition("/")
    return kind == "weights" and parameter in engine.weights.frozen


def without_moments(engine: EngineState, manifest: Manifest) -> set[str]:
    """Names of the trained parameters on this process whose moments the checkpoint does not have."""
    names = stored_names(manifest.tensors, layers_in_order(engine.module))
    moments = tensors_of(engine, with_moments=True).keys() - tensors_of(engine, with_moments=False).keys()
    return {key.partition("/")[2] for key in moments if names.get(key, key) not in manifest.tensors}


def like(target: torch.Tensor | TensorParts, dtype: torch.dtype) -> TensorParts:
    """New memory for the same boxes in another number format, for instance of a parameter frozen on one side only."""
    parts = as_parts(target)
    boxes = tuple((offsets, torch.empty(part.shape, dtype=dtype)) for offsets, part in parts.parts)
    return TensorParts(parts.shape, boxes, dtype)
