"""``ADAMW``: AdamW as an elementwise optimizer, made of its update and its state vectors."""

from __future__ import annotations

from gptpar.optim.adam_update import STATES, AdamHyperparameters, change, numbers
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.device_adam import device_adam
from gptpar.optim.elementwise import ElementwiseOptimizer

ADAMW = ElementwiseOptimizer("adam", STATES, AdamHyperparameters, numbers, change, device_adam, CpuAdam)
"""AdamW (:mod:`gptpar.optim.adam_update`), with a kernel for GPUs (Triton) and one for CPUs (C++)."""
