"""``ADAMW``: AdamW as an elementwise optimizer, made of its update and its state vectors, and its rounded variants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from gptpar.optim.adam_update import STATES, AdamHyperparameters, change, numbers
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.device_adam import device_adam
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.rounded_states import KEPT_IN

ADAMW = ElementwiseOptimizer("adam", STATES, AdamHyperparameters, numbers, change, device_adam, CpuAdam)
"""AdamW (:mod:`gptpar.optim.adam_update`), with a kernel for GPUs (Triton) and one for CPUs (C++)."""


@cache
def adamw_with(first: str, second: str) -> ElementwiseOptimizer:
    """AdamW whose two moments have these number formats: ``fp32``, or one of :data:`KEPT_IN`."""
    formats = zip(STATES, (first, second), strict=True)
    rounded = {name: KEPT_IN[one] for name, one in formats if one in KEPT_IN}
    return replace(ADAMW, rounded=rounded, host_kernel=partial(CpuAdam, rounded=rounded)) if rounded else ADAMW
