"""Flags of optimizer state, parameters and gradients in host memory or on a disk, and whether they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gptpar.config.fields import flag, flag_name

if TYPE_CHECKING:
    from gptpar.config import Config, Flags


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Optimizer state in host memory, updated by the CPU while the GPU works on."""

    cpu_optimizer: bool = flag(
        False,
        "keep master weights and moments in host memory and update them on the CPU",
        names=("--optimizer-cpu-offload",),
    )
    cpu_optimizer_ratio: float | Literal["auto"] = flag(
        1.0,
        "share of the optimizer's elements on the CPU, 0 to 1, exact to the element; auto: the smallest share with "
        "which the rest fits the GPU, found by a trial step",
        metavar="X|auto",
        least=0,
        most=1,
        names=("--optimizer-offload-fraction",),
    )
    optimizer_nvme_path: str | None = flag(
        None,
        "with --cpu-optimizer: keep that state in files in this folder instead (an NVMe disk); the system moves what "
        "does not fit into memory",
        metavar="DIR",
    )
    cpu_parameters: bool = flag(
        False,
        "also keep the parameters in host memory, and copy each layer's to the device while they are needed",
        names=("--offload-parameters",),
    )
    offload_gradients: str = flag(
        "auto",
        "with --cpu-optimizer: copy each micro-batch's gradients to host memory as they come, and add "
        "them up there, instead of keeping them on the GPU until the CPU has used them; auto: if gptpar plan predicts "
        "that the GPU of a run on one has no room to keep them",
        choices=("auto", "off", "on"),
    )
    offload_gradients_ratio: float = flag(
        1.0,
        "with --offload-gradients on: the share of layers, embedding and LM head among them, whose gradients over "
        "micro-batches are added up in host memory, above 0; the others' sums stay on the GPU (4 bytes a parameter); "
        "--offload-gradients auto takes the smallest of 0.25, 0.5, 0.75 and 1 that fits",
        metavar="X",
        least=0,
        most=1,
    )
    offload_speculation: str = flag(
        "auto",
        "update during the backward pass as if nothing were clipped, and again if something is; auto: as many elements "
        "as host memory has room for (12 bytes each); off: none; on: all",
        choices=("auto", "off", "on"),
    )
    cpu_optimizer_threads: int | None = flag(
        None,
        "threads of each process's CPU optimizer (default: its share of the cores, less two or a fifth of them)",
        least=1,
        most=10_000,
    )

    @property
    def ratio(self) -> float | Literal["auto"]:
        """The host's share of the optimizer's elements; ``"auto"``: to be found out."""
        return self.cpu_optimizer_ratio if self.cpu_optimizer else 0.0

    @property
    def least_ratio(self) -> float:
        """The host's share; where it is to be found out, the least that it can become."""
        return 0.0 if self.ratio == "auto" else self.ratio

    @property
    def gradients_leave_at_once(self) -> bool:
        """Whether gradients of the CPU's share are given up by the device when they are final; decided by now."""
        return self.cpu_optimizer and self.offload_gradients == "on"

    @property
    def summed_ratio(self) -> float:
        """The share of layers whose gradients are added up in host memory."""
        return self.offload_gradients_ratio if self.gradients_leave_at_once else 0.0


def check_offload(flags: Flags, world_size: int) -> Iterator[str]:
    """Whether the flags for offload are numbers, and are used."""
    o = flags.offload
    if not o.cpu_optimizer:
        for name in (
            "cpu_optimizer_ratio",
            "offload_gradients",
            "offload_gradients_ratio",
            "offload_speculation",
            "cpu_optimizer_threads",
            "optimizer_nvme_path",
        ):
            if getattr(o, name) != getattr(OffloadConfig(), name):
                yield f"{flag_name(name)} needs --cpu-optimizer."
    elif o.offload_gradients_ratio == 0:
        yield "--offload-gradients-ratio 0 is --offload-gradients off: say that."
    elif o.offload_gradients != "on" and o.offload_gradients_ratio != 1:
        yield f"--offload-gradients-ratio {o.offload_gradients_ratio:g} needs --offload-gradients on."
    if o.gradients_leave_at_once:
        for obstacle in offload_gradients_obstacles(flags, world_size):
            yield f"--offload-gradients on: {obstacle}."
    if o.optimizer_nvme_path and o.offload_speculation == "on":
        yield "--offload-speculation on needs a second copy of the state in memory, which --optimizer-nvme-path avoids."
    if o.optimizer_nvme_path and not os.path.isdir(o.optimizer_nvme_path):
        yield f"--optimizer-nvme-path {o.optimizer_nvme_path} is not a folder: make it, on the disk that is meant."


def offload_gradients_obstacles(flags: Flags | Config, world_size: int) -> Iterator[str]:
    """Reasons that keep gradients on the device until they are used, each as a part of a sentence."""
    if flags.logging.log_num_zeros_in_grad and flags.batch.adds_gradients(world_size):
        yield "--log-num-zeros-in-grad counts zeros of sums on the GPU (do without, or --offload-gradients off)"
    if flags.precision.gradient_accumulation_fusion:
        yield "--gradient-accumulation-fusion adds to sums on the GPU (do without, or --offload-gradients off)"
