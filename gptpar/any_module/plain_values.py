"""Converts Python values to JSON and back without loss; values that JSON cannot hold are reported as problems."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_KINDS = {"tuple": tuple, "dict": dict, "counter": Counter}
_MARK = "__python__"
"""Key of a JSON object that encodes a value of another type, with its ``values``."""


def to_json(value: Any, name: str, problems: list[str]) -> Any:
    """A value as JSON. A tensor of one number becomes that number.

    Args:
        value: any value.
        name: of the value, for the sentences.
        problems: a list that receives a sentence for each part that JSON cannot hold.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex():
        return value.item()
    if type(value) in (list, tuple):
        items = [to_json(one, f"{name}[{place}]", problems) for place, one in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "values": items}
    if isinstance(value, dict):
        return _dict_to_json(value, name, problems)
    problems.append(f"{name} is {_described(value)}")
    return None


def _dict_to_json(value: dict[Any, Any], name: str, problems: list[str]) -> dict[str, Any]:
    values = [to_json(one, f"{name}[{key!r}]", problems) for key, one in value.items()]
    counts = isinstance(value, Counter)
    if not counts and _MARK not in value and all(isinstance(key, str) for key in value):
        return dict(zip(value, values, strict=True))
    keys = [to_json(key, f"a key of {name}", problems) for key in value]
    pairs = [list(pair) for pair in zip(keys, values, strict=True)]
    return {_MARK: "counter" if counts else "dict", "values": pairs}


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`.

    Raises:
        ValueError: :func:`to_json` has not made this value.
    """
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: from_json(one) for key, one in value.items()}
    kind = _KINDS.get(value[_MARK]) if isinstance(value[_MARK], str) else None
    items = from_json(value.get("values"))
    if kind is None or not isinstance(items, list):
        raise ValueError(f"{value!r:.60} stands for no value that this version knows")
    if kind is tuple:
        return tuple(items)
    try:
        return kind(dict(items))
    except (TypeError, ValueError):
        raise ValueError(f"{value!r:.60} has no pairs of keys and values") from None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
