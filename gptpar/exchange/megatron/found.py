"""``Found``: the contents of a Megatron checkpoint in any of its formats; tensors are read when asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import NEEDED

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, named as in our checkpoints."""


@dataclass(frozen=True)
class RankPart:
    """One tensor rank's split of a parameter, or of an optimizer state of it.

    Attributes:
        shape: the split's shape.
        read: returns tensors whose elements follow each other in the split, row by row. They stay on the disk until
            they are used, if the file's format allows it.
    """

    shape: tuple[int, ...]
    read: Callable[[], Sequence[torch.Tensor]]


Parts = dict[str, list[RankPart]]
"""Our global name -> each tensor rank's split. Layers that are stored as one tensor follow each other."""


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files have been opened.

    Attributes:
        path: the checkpoint's folder.
        arguments: the arguments of the run that saved it.
        beside: its values beside the tensors: ``iteration``, ``checkpoint_version``, the scheduler's state.
        num_ranks: tensor ranks; each has a split of every parameter.
        states: kind -> splits. With the optimizer's state the weights are fp32, and the moments are there.
        steps: the number of updates of the moments; ``None``: only weights could be read.
    """

    path: Path
    arguments: Namespace
    beside: Mapping[str, Any]
    num_ranks: int
    states: Mapping[str, Parts]
    steps: int | None = None


def with_arguments(arguments: object, file: Path) -> Namespace:
    """Check that a checkpoint has its run's arguments, and return them.

    Args:
        file: the checkpoint's file that should hold them.

    Raises:
        CheckpointError: it has none.
    """
    if not isinstance(arguments, Namespace):
        needed = ", ".join(f"{name}=..." for name in NEEDED)
        found = "no 'args'" if arguments is None else f"'args' of type {type(arguments).__name__}"
        raise CheckpointError(
            f"{file} holds {found}: the arguments of the run, an argparse.Namespace, describe the model. Load and save "
            "the checkpoint once with the Megatron that made it, or add them by torch.load and torch.save: "
            f"args=argparse.Namespace({needed}), and those whose values are not Megatron's defaults (normalization, "
            "swiglu, position_embedding_type, num_query_groups, ...)"
        )
    return arguments


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
