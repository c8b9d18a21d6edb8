"""The optimizer's state as torch's optimizers save it: by parameter, whoever updates which of its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gptpar.offload.local_parameters import LocalParameter, local_of
from gptpar.optim.adamw import ADAMW

Views = Callable[[str], Iterator[tuple[LocalParameter, int, torch.Tensor]]]
"""(parameter, first element, values, no copies) of ``weights`` or one of AdamW's moments."""

NAMES = (*((name, name) for name in ADAMW.states), ("weights", "master"))
"""Names of the state here, and torch's names, which are saved."""


def gather_state(parameters: Sequence[LocalParameter], views: Views) -> dict[str, dict[str, torch.Tensor]]:
    """unit -> name -> a copy in host memory, in the parameter's shape; ``master`` of 16-bit parameters only."""
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
    """Fill moments and masters; what is not there is zero, and masters are taken from the parameters.

    Args:
        states: unit -> what was saved of it.
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
    """Let masters follow parameters that were changed from outside.

    A master that rounds to the parameter stays: a model's checkpoint may be loaded after the optimizer's.
    """
    for local, at, master in views("weights"):
        if local.unit in changed:
            values = local.flat[at : at + master.numel()].to(master.device)
            master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))


def problems_of_state(
    parameters: Sequence[LocalParameter], states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Sentences on what cannot be loaded."""
    problems = [f"{word} is not supported" for word in ("amsgrad", "maximize") if any(g.get(word) for g in groups)]
    for local, state in zip(parameters, states, strict=False):
        for _, name in NAMES:
            count = local_of(state[name]).numel() if name in state else local.flat.numel()
            if count != local.flat.numel():
                problems.append(f"{name} of parameter {local.unit} has {count} elements, not {local.flat.numel()}")
    return problems
