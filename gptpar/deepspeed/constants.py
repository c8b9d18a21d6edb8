"""DeepSpeed's constants: names of values of configurations, and its version's numbers."""

from __future__ import annotations

import inspect

from gptpar.deepspeed.names import VERSION
from gptpar.optim.step_schedules import FORMULAS

_MAJOR, _MINOR, _PATCH = map(int, VERSION.split("."))

_VALUES: dict[str, str | int] = {
    "__version_major__": _MAJOR,
    "__version_minor__": _MINOR,
    "__version_patch__": _PATCH,
    "__git_hash__": "gptpar",
    "__git_branch__": "gptpar",
    "ADAM_OPTIMIZER": "adam",
    "ADAMW_OPTIMIZER": "adamw",
    "LION_OPTIMIZER": "lion",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
    **{name.upper(): name for formula in FORMULAS.values() for name in inspect.signature(formula).parameters},
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "ONE_CYCLE": "OneCycle",
    "LR_RANGE_TEST": "LRRangeTest",
}


def __getattr__(name: str) -> str | int:
    if name not in _VALUES:
        raise AttributeError(f"deepspeed has no constant {name!r} in gptpar")
    return _VALUES[name]
