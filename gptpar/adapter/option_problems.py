"""Finds contradictions among the number formats of a configuration of ``gptpar.initialize``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gptpar.config import PrecisionConfig


def precision_problems(precision: PrecisionConfig, wanted: str | None) -> Iterator[str]:
    """A sentence for each.

    Args:
        wanted: ``data_types.param_dtype``; ``None``: it is not given.
    """
    found = "fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32"
    if wanted not in (None, found):
        yield f"data_types.param_dtype is {json.dumps(wanted)}, and fp16 and bf16 say {found}: make them agree."
    if precision.fp16 and precision.bf16:
        yield "fp16 and bf16 are both enabled: choose one number format."
    if precision.fp16 and precision.loss_scale is None and precision.initial_loss_scale < precision.min_loss_scale:
        yield (
            f"fp16.initial_scale_power: the scale begins at {precision.initial_loss_scale:g}, below min_loss_scale "
            f"{precision.min_loss_scale:g}: raise it, or lower min_loss_scale."
        )
