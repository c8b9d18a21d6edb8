"""Converts Python values to JSON and tensors, and back without loss; values that are neither are told as problems.

Nothing that is read is executed: each kind of value has a name, and a constructor here.
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gptpar.checkpoint.manifest import dtype_name
from gptpar.errors import CheckpointError

_MARK = "__python__"
"""Key of a JSON object that encodes a value of another type, with its ``values``."""

_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_MAPPINGS: Mapping[str, Any] = {"dict": dict, "counter": Counter, "ordered": OrderedDict}
_OBJECTS: Mapping[str, Any] = {"namespace": argparse.Namespace, "simple_namespace": SimpleNamespace}
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_TEXTS: Mapping[str, Any] = {"path": Path, "device": torch.device, "dtype": _DTYPES.__getitem__}
_TENSORS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
    "bytes": lambda tensor: tensor.numpy().tobytes(),
}
_COMPLEX = "complex_"
"""Prefix of the kind of complex tensors, which are stored as pairs of numbers."""


def to_json(value: Any, name: str, problems: list[str], tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """A value as JSON.

    Args:
        value: any value.
        name: of the value, for the sentences.
        problems: a list that receives a sentence for each part that cannot be stored.
        tensors: receives tensors, arrays and bytes by names of their own; ``None``: these are problems, and a tensor of
            one number becomes that number.
    """
    if tensors is not None and (stored := _as_tensor(value)) is not None:
        kind, tensor = stored
        place = f"client/{len(tensors)}"
        tensors[place] = tensor
        return {_MARK: kind, "values": place}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if tensors is None and isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex():
        return value.item()
    if type(value) is list:
        return [to_json(one, f"{name}[{place}]", problems, tensors) for place, one in enumerate(value)]
    if isinstance(value, dict):
        return _dict_to_json(value, name, problems, tensors)
    if (known := _as_kind(value)) is not None:
        kind, values = known
        return {_MARK: kind, "values": to_json(values, name, problems, tensors)}
    problems.append(f"{name} is {_described(value)}")
    return None


def _as_kind(value: Any) -> tuple[str, Any] | None:
    """(kind, text or list) of a value that is stored as such."""
    kind = next((kind for kind, cls in {**_SEQUENCES, **_OBJECTS}.items() if type(value) is cls), None)
    if kind is not None:
        return kind, list(value) if kind in _SEQUENCES else [list(pair) for pair in vars(value).items()]
    if isinstance(value, PurePath):
        return "path", str(value)
    if isinstance(value, torch.device | torch.dtype):
        return type(value).__name__, str(value).removeprefix("torch.")
    return None


def _as_tensor(value: Any) -> tuple[str, torch.Tensor] | None:
    """(kind, tensor) of a value that is stored as a tensor."""
    if isinstance(value, bytes | bytearray):
        kind, found = "bytes", torch.from_numpy(np.frombuffer(bytes(value), np.uint8).copy())
    elif isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            found = torch.from_numpy(np.array(value, order="C"))
        except TypeError:  # it has texts, objects or dates
            return None
    elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
        kind, found = "tensor", value.detach().resolve_conj().resolve_neg()
    else:
        return None
    if found.is_complex():
        kind, found = _COMPLEX + kind, torch.view_as_real(found)
    try:
        dtype_name(found.dtype)
    except CheckpointError:
        return None
    return kind, found.contiguous()


def _dict_to_json(
    value: dict[Any, Any], name: str, problems: list[str], tensors: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    values = [to_json(one, f"{name}[{key!r}]", problems, tensors) for key, one in value.items()]
    kind = next((kind for kind, cls in _MAPPINGS.items() if type(value) is cls), "dict")
    kind = "counter" if isinstance(value, Counter) else kind
    if kind == "dict" and _MARK not in value and all(isinstance(key, str) for key in value):
        return dict(zip(value, values, strict=True))
    keys = [to_json(key, f"a key of {name}", problems) for key in value]
    return {_MARK: kind, "values": [list(pair) for pair in zip(keys, values, strict=True)]}


def from_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The inverse of :func:`to_json`.

    Raises:
        ValueError: :func:`to_json` has not made this value.
    """
    if isinstance(value, list):
        return [from_json(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: from_json(one, tensors) for key, one in value.items()}
    try:
        return _value_of(value[_MARK], from_json(value.get("values"), tensors), tensors or {})
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError):
        raise ValueError(f"{value!r:.60} stands for no value that this version knows") from None


def _value_of(kind: str, values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    plain = kind.removeprefix(_COMPLEX)
    if plain in _TENSORS:
        found = tensors[values]
        return _TENSORS[plain](found if plain == kind else torch.view_as_complex(found))
    if not (isinstance(values, str) if kind in _TEXTS else isinstance(values, list)):
        raise TypeError
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](dict(values))
    return _OBJECTS[kind](**dict(values)) if kind in _OBJECTS else {**_SEQUENCES, **_TEXTS}[kind](values)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
