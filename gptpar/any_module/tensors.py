"""The tensors in what a module is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
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
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested tuples, lists, dictionaries and dataclasses, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(inner, change) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(inner, change) for inner in value)
    if type(value) is dict:
        return {name: mapped(inner, change) for name, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Mapping):
        return replace(value, **{field.name: mapped(getattr(value, field.name), change) for field in fields(value)})
    return value
