"""Finds and replaces tensors in the arguments and results of layers: nested tuples, lists, mappings, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif _is_instance_of_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change each tensor in nested tuples, lists, dictionaries and dataclasses; returns a copy of the nest."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        inside = [mapped(inner, change) for inner in value]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    if isinstance(value, MutableMapping) and type(value) is not dict:  # transformers' batches and outputs, for one
        changed = copy(value)
        for name, inner in value.items():
            changed[name] = mapped(inner, change)
        return changed
    if isinstance(value, Mapping):
        return {name: mapped(inner, change) for name, inner in value.items()}
    if _is_instance_of_dataclass(value):
        changed = copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), change))  # also of frozen ones
        return changed
    return value


Outline = Any
"""Compared with ``==``."""

_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def outline(value: Any) -> Outline:
    """Everything in a value except the numbers in its tensors: a recorded step fits all values of equal outlines.

    If a value has an object of unknown contents, its outline equals no other outline.
    """
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Mapping):
        return type(value), [(name, outline(inner)) for name, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [outline(inner) for inner in value]
    if _is_instance_of_dataclass(value):
        return type(value), [outline(getattr(value, field.name)) for field in fields(value)]
    return object()


def _is_instance_of_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
