"""What the files of a checkpoint of Megatron hold, whichever form they have; tensors are read when asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, named as in our checkpoints."""


@dataclass(frozen=True)
class RankPart:
    """One tensor rank's part of a parameter, or of a state of it.

    Attributes:
        read: returns it in host memory.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


Parts = dict[str, list[RankPart]]
"""Our global name -> each tensor rank's part; several layers that are stored as one follow each other."""


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files have been opened.

    Attributes:
        path: its folder.
        arguments: of the run that saved it.
        beside: what it says beside the tensors: ``iteration``, ``checkpoint_version``, the scheduler's state.
        num_ranks: tensor ranks that have a part of a parameter each.
        states: kind -> parts; weights alone, or moments and fp32 weights as well.
        steps: updates that the moments have seen; ``None``: the weights are all that could be had.
    """

    path: Path
    arguments: Namespace
    beside: Mapping[str, Any]
    num_ranks: int
    states: Mapping[str, Parts]
    steps: int | None = None
