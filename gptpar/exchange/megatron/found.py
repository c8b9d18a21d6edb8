"""``Found``: the contents of a Megatron checkpoint in any of its formats; tensors are read when asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
