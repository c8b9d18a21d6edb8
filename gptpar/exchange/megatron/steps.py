"""Reads the number of updates from the optimizer's state in a Megatron checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def steps_in(state: Any) -> int | None:
    """The number of updates in an optimizer's state dictionary, which counts them in all, by group or by parameter.

    Returns:
        The number; ``None``: the dictionary has none.
    """
    inner = state.get("optimizer", state) if isinstance(state, dict) else None
    found = (steps_of(place.get(name)) for place in _places(inner) for name in ("common_step", "step"))
    return next((steps for steps in found if steps is not None), None)


def _places(state: Any) -> Iterator[dict[Any, Any]]:
    if not isinstance(state, dict):
        return
    of_state, groups = state.get("state"), state.get("param_groups")
    if isinstance(of_state, dict):
        yield of_state
        yield from (one for one in of_state.values() if isinstance(one, dict))
    if isinstance(groups, list):
        yield from (one for one in groups if isinstance(one, dict))


def steps_of(value: Any) -> int | None:
    """A number of steps, given as a number or a tensor; ``None``: the value is neither."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        is_number = not value.is_complex() and bool(torch.isfinite(value))
        value = int(value.item()) if is_number and value.item() == int(value.item()) else None
    return value if type(value) is int and value >= 0 else None
