"""The boxes of a global tensor in a range of a flat buffer, as a shard of an optimizer holds them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gptpar.topology.tensor_parts import TensorParts, views_of_flat


def parts_of_flat(shape: Sequence[int], *args: Any) -> TensorParts:
    """Args: see :func:`views_of_flat`; ``shape`` is the global tensor's."""
    flat = next(one for one in args if isinstance(one, torch.Tensor))
    return TensorParts(torch.Size(shape), views_of_flat(*args), flat.dtype)


def whole_tensors(parts: Mapping[str, TensorParts]) -> dict[str, torch.Tensor]:
    """The tensors by name, where all elements of each are here."""
    found = {name: torch.empty(held.shape, dtype=held.dtype) for name, held in parts.items()}
    for name, held in parts.items():
        for offsets, part in held.parts:
            found[name][tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return found
