"""Hooks that let a module's forward pass wait for the optimizer, and submit each gradient when it is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read their submodules' parameters without calling the submodules."""


def watch_readers(
    module: nn.Module,
    unit_of: Mapping[int, str],
    before_forward: Callable[..., None],
    before_state_dict: Callable[..., None],
) -> Iterator[tuple[list[str], list[Any]]]:
    """Add hooks to every submodule that reads parameters.

    Args:
        unit_of: ``id`` of a parameter -> its name.
        before_forward: called with the names of the parameters that are about to be read, a flag that tells whether
            another stream than the current one reads them, and torch's arguments.
        before_state_dict: called with torch's arguments.

    Yields:
        (names, removable hooks) of each such submodule
    """
    for inner in module.modules():
        gathers = _gathers(inner)
        units = [unit_of[id(p)] for p in _read_by(inner) if id(p) in unit_of]
        if units:
            hooks = [
                inner.register_forward_pre_hook(partial(before_forward, units, gathers), prepend=True),
                inner.register_state_dict_pre_hook(before_state_dict),
            ]
            yield units, hooks


def watch_gradient(parameter: torch.Tensor, ready: Callable[..., None]) -> list[Any]:
    """Call ``ready`` when a backward pass has added to ``.grad``; returns the hook, if the parameter can have one."""
    return [parameter.register_post_accumulate_grad_hook(ready)] if parameter.requires_grad else []


def _gathers(module: nn.Module) -> bool:
    """Whether a module is one of FSDP2's: it gathers its parameters on its own streams, before its forward."""
    return hasattr(module, "unshard")


def _read_by(module: nn.Module) -> Collection[nn.Parameter]:
    if isinstance(module, READ_INSIDE):
        return list(module.parameters())
    found = list(module.parameters(recurse=False))
    if _gathers(module):
        for inner in module.children():
            found += _managed(inner)
    return found


def _managed(module: nn.Module) -> list[nn.Parameter]:
    if _gathers(module):
        return []
    found = list(module.parameters(recurse=False))
    for inner in module.children():
        found += _managed(inner)
    return found
