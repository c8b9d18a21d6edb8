"""Checks the CPU optimizer's flags, and lists what forbids ``--offload-gradients``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gptpar.config import BatchConfig, Flags, OffloadConfig
from gptpar.config.fields import flag_name
from gptpar.config.sections.batch import is_one_micro_batch


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
        for obstacle in offload_gradients_obstacles(flags.batch, world_size):
            yield f"--offload-gradients on: {obstacle}."
    if o.optimizer_nvme_path and o.offload_speculation == "on":
        yield "--offload-speculation on needs a second copy of the state in memory, which --optimizer-nvme-path avoids."
    if o.optimizer_nvme_path and not os.path.isdir(o.optimizer_nvme_path):
        yield f"--optimizer-nvme-path {o.optimizer_nvme_path} is not a folder: make it, on the disk that is meant."


def offload_gradients_obstacles(batch: BatchConfig[None], world_size: int) -> Iterator[str]:
    """What keeps gradients on the device until they are used, each as a part of a sentence.

    Sums are formed on the device: they are there during the whole step anyway.
    """
    if world_size > 1:
        yield f"{world_size} processes add up their gradients on the GPU (use one process, or --offload-gradients off)"
    elif not is_one_micro_batch(batch):
        yield (
            f"a step of several micro-batches adds up their gradients on the GPU (set --micro-batch-size "
            f"{batch.micro_batch_size} and --global-batch-size {batch.global_batch_size} to one number, without a "
            "schedule of batch sizes)"
        )
