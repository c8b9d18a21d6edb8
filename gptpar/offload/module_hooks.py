"""Hooks: a module's forward pass waits for the optimizer, and a parameter's gradient is submitted when it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that compute with parameters of modules inside them without calling those."""


def watch_readers(
    module: nn.Module,
    unit_of: Mapping[int, str],
    before_forward: Callable[..., None],
    before_state_dict: Callable[..., None],
) -> Iterator[tuple[list[str], list[Any]]]:
    """Put a hook before everything inside a module that reads parameters.

    Args:
        unit_of: ``id`` of a parameter -> its name.
        before_forward: is called with the names of the parameters that are about to be read, whether that happens on
            other streams than the current one, and torch's arguments.
        before_state_dict: is called with torch's arguments.

    Yields:
        (names, hooks that can be removed)
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
    """Have ``ready`` called when a backward pass has added to ``.grad``; returns the hook, if there can be one."""
    return [parameter.register_post_accumulate_grad_hook(ready)] if parameter.requires_grad else []


def _gathers(module: nn.Module) -> bool:
    """Whether it is one of FSDP2's, which gathers what it manages before its own forward, on streams of its own."""
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
