"""Optimizer offload."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gptpar.config import Config
from gptpar.config.fields import flag_name
from gptpar.config.gradients import offload_gradients_obstacles
from gptpar.config.offload import OffloadConfig


def check_offload(config: Config, world_size: int) -> Iterator[str]:
    """Whether the flags for offload are numbers, and are used."""
    o = config.offload
    if not o.cpu_optimizer:
        for name in (
            "cpu_optimizer_ratio",
            "offload_gradients",
            "offload_speculation",
            "cpu_optimizer_threads",
            "optimizer_nvme_path",
        ):
            if getattr(o, name) != getattr(OffloadConfig(), name):
                yield f"{flag_name(name)} needs --cpu-optimizer."
    if o.gradients_leave_at_once:
        for obstacle in offload_gradients_obstacles(config, world_size):
            yield f"--offload-gradients on: {obstacle}."
    if o.optimizer_nvme_path and o.offload_speculation == "on":
        yield "--offload-speculation on needs a second copy of the state in memory, which --optimizer-nvme-path avoids."
    if o.optimizer_nvme_path and not os.path.isdir(o.optimizer_nvme_path):
        yield f"--optimizer-nvme-path {o.optimizer_nvme_path} is not a folder."
    if o.cpu_optimizer_ratio == "auto":
        return
    try:
        good = 0.0 <= float(o.cpu_optimizer_ratio) <= 1.0
    except ValueError:
        good = False
    if not good:
        yield f"--cpu-optimizer-ratio {o.cpu_optimizer_ratio}: a number from 0 to 1, or auto, is needed."
