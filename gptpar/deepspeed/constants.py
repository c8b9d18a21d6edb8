"""DeepSpeed's constants: names of values of configurations, defaults, and its version's numbers."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from gptpar.deepspeed.names import FACTS, VERSION
from gptpar.deepspeed.processes import PORT
from gptpar.optim.step_schedules import FORMULAS

_PARTS = ("major", "minor", "patch")
_VALUES: dict[str, Any] = {
    **{f"__version_{part}__": int(number) for part, number in zip(_PARTS, VERSION.split("."), strict=True)},
    **{name.upper(): name for formula in FORMULAS.values() for name in inspect.signature(formula).parameters},
    **FACTS["constants"],
    "LOG_LEVEL_DEFAULT": None,  # the logger keeps its level
    "TORCH_DISTRIBUTED_DEFAULT_PORT": PORT,
    "default_pg_timeout": dist.default_pg_timeout,
}


def __getattr__(name: str) -> Any:
    if name not in _VALUES:
        raise AttributeError(f"deepspeed has no constant {name!r} in gptpar")
    return _VALUES[name]
