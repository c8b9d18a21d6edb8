"""Translates checkpoints of former versions, which named a pipeline's layers by their places.

A pipeline of one stage had groups, buffers and extra states of ``chunks.0.layers.3``; the layer is ``layers.3``, or has
the name that the user gave it. Weights and moments had the layers' names. Groups were frozen as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.deepspeed.engines.stored_state import StoredState

_PLACE = re.compile(r"chunks\.0\.layers\.(\d+)(?=\.|$)")
_MISSED = "missed_steps"
"""Key of a group that was frozen as a whole: the steps that its parameters missed."""


def layers_in_order(module: nn.Module) -> list[str]:
    """Names of a pipeline's layers, a tied one once, the same on all stages; none of another module."""
    return list(dict.fromkeys(spec.name for spec in module.specs)) if isinstance(module, PipelineModule) else []


def present_name(name: str, layers: list[str]) -> str:
    """The name of a parameter, buffer or module today.

    Args:
        name: in a checkpoint, without the kind of the tensor.
        layers: the model's, by :func:`layers_in_order`.
    """
    found = _PLACE.match(name)
    if found is None or int(found[1]) >= len(layers):
        return name
    return layers[int(found[1])] + name[found.end() :]


def present_state(state: StoredState, layers: list[str]) -> StoredState:
    """A state whose groups and extra states have the names of today, and each parameter the steps that it missed."""
    groups, missed = [], dict(state.missed)
    for group in state.groups:
        names = [present_name(str(name), layers) for name in group["params"]]
        missed |= dict.fromkeys(names, group[_MISSED]) if _MISSED in group else {}
        groups.append({name: value for name, value in group.items() if name != _MISSED} | {"params": names})
    extra = {present_name(path, layers): one for path, one in state.extra.items()}
    return replace(state, groups=groups, missed=missed, extra=extra)


def stored_names(tensors: Mapping[str, object], layers: list[str]) -> dict[str, str]:
    """``KIND/NAME`` of today -> of the checkpoint, for all tensors of a checkpoint."""
    split = {name: name.partition("/") for name in tensors}
    return {f"{kind}/{present_name(rest, layers)}": name for name, (kind, _, rest) in split.items()}
