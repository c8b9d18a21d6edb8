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
        for inner in _fields(value).values():
            yield from tensors_in(inner)


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
        for name, inner in _fields(value).items():
            object.__setattr__(changed, name, mapped(inner, change))  # also of frozen ones
        return changed
    return value


Outline = Any
"""Compared with ``==``."""

_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def outline(value: Any) -> Outline:
    """Everything in a value except the numbers in its tensors: a recorded step fits all values of equal outlines.

    If a value has an object of unknown contents, its outline equals no other outline. The same holds for a set of
    tensors, and for a dataclass with attributes beside its fields: :func:`mapped` does not replace what is in them.
    """
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Mapping):
        return type(value), [(name, outline(inner)) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [outline(inner) for inner in value]
    if isinstance(value, set | frozenset) and all(isinstance(inner, _PLAIN) for inner in value):
        return type(value), value
    if _is_instance_of_dataclass(value):
        known = _fields(value)
        if not getattr(value, "__dict__", {}).keys() - known.keys():
            return type(value), [(name, outline(inner)) for name, inner in known.items()]
    return object()


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields that are set."""
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}


def _is_instance_of_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
