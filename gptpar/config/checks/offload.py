"""Checks the CPU optimizer's flags, and lists what forbids ``--offload-gradients``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gptpar.config import Config, Flags, OffloadConfig
from gptpar.config.fields import flag_name


def check_offload(flags: Flags, world_size: int) -> Iterator[str]:
    """Whether the flags for offload are numbers, and are used."""
    o = flags.offload
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
        for obstacle in offload_gradients_obstacles(flags, world_size):
            yield f"--offload-gradients on: {obstacle}."
    if o.optimizer_nvme_path and o.offload_speculation == "on":
        yield "--offload-speculation on needs a second copy of the state in memory, which --optimizer-nvme-path avoids."
    if o.optimizer_nvme_path and not os.path.isdir(o.optimizer_nvme_path):
        yield f"--optimizer-nvme-path {o.optimizer_nvme_path} is not a folder: make it, on the disk that is meant."


def offload_gradients_obstacles(flags: Flags | Config, world_size: int) -> Iterator[str]:
    """What keeps gradients on the device until they are used, each as a part of a sentence."""
    if flags.logging.log_num_zeros_in_grad and flags.batch.adds_gradients(world_size):
        yield "--log-num-zeros-in-grad counts zeros of sums on the GPU (do without, or --offload-gradients off)"
