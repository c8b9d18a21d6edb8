"""Converts the optimizer's state to and from torch's format: by parameter, whatever the twin-flow ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gptpar.offload.local_parameters import LocalParameter, local_of
from gptpar.optim.adamw import ADAMW

Views = Callable[[str], Iterator[tuple[LocalParameter, int, torch.Tensor]]]
"""(parameter, first element, view of the values) of ``weights`` or one of AdamW's moments."""

NAMES = (*((name, name) for name in ADAMW.states), ("weights", "master"))
"""(the kernel's name, the saved name) of each state vector; the saved names are torch's."""


def gather_state(parameters: Sequence[LocalParameter], views: Views) -> dict[str, dict[str, torch.Tensor]]:
    """unit -> name -> a copy in host memory, in the parameter's shape; only 16-bit parameters have ``master``."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for local in parameters:
        wide = torch.promote_types(local.flat.dtype, torch.float32)
        names = [name for _, name in NAMES if name != "master" or local.has_masters]
        found[local.unit] = {name: torch.empty(local.local.shape, dtype=wide) for name in names}
    for kind, name in NAMES:
        for local, at, values in views(kind):
            if name in found[local.unit]:
                found[local.unit][name].view(-1)[at : at + values.numel()] = values
    return found


def place_state(states: Mapping[str, Mapping[str, Any]], views: Views) -> None:
    """Fill the moments and master weights from a saved state.

    A missing moment is zero. Missing master weights are taken from the parameters.

    Args:
        states: unit -> its saved state, by name.
    """
    for kind, name in NAMES:
        for local, at, values in views(kind):
            saved = states[local.unit].get(name)
            if name == "master" and (saved is None or not local.has_masters):
                saved = local.flat
            if saved is None:
                values.zero_()
            else:
                values.copy_(local_of(saved).reshape(-1)[at : at + values.numel()])


def follow_parameters(changed: set[str], views: Views) -> None:
    """Set the master weights of parameters that were changed from outside.

    A master weight that rounds to its parameter stays, and keeps its low bits: a model's checkpoint may be loaded after
    the optimizer's.
    """
    for local, at, master in views("weights"):
        if local.unit in changed:
            values = local.flat[at : at + master.numel()].to(master.device)
            master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))


def problems_of_state(
    parameters: Sequence[LocalParameter], states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Sentences that say what cannot be loaded, and why."""
    problems = [f"{word} is not supported" for word in ("amsgrad", "maximize") if any(g.get(word) for g in groups)]
    for local, state in zip(parameters, states, strict=False):
        for _, name in NAMES:
            count = local_of(state[name]).numel() if name in state else local.flat.numel()
            if count != local.flat.numel():
                problems.append(f"{name} of parameter {local.unit} has {count} elements, not {local.flat.numel()}")
    return problems
