"""``deepspeed.utils.groups``: sizes, ranks and groups of the data axis, the only one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

mpu = None
"""No model-parallel unit."""

_QUESTION = re.compile(r"_?get_(data|sequence_data|model|tensor_model|sequence)_parallel_(group|world_size|rank)")


_OF_ALL: dict[str, Callable[[], Any]] = {
    "group": lambda: dist.group.WORLD,
    "world_size": dist.get_world_size,
    "rank": dist.get_rank,
}
_ALONE: dict[str, Callable[[], Any]] = {"group": lambda: None, "world_size": lambda: 1, "rank": lambda: 0}


def __getattr__(name: str) -> Callable[[], Any]:
    """``_get_data_parallel_world_size`` and its like; on axes other than the data axis a process is alone."""
    asked = _QUESTION.fullmatch(name)
    if asked is None:
        raise AttributeError(f"deepspeed.utils.groups has no {name!r} in gptpar")
    return (_OF_ALL if asked[1].endswith("data") else _ALONE)[asked[2]]
