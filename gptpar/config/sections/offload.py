"""Flags of optimizer state, parameters and gradients in host memory or on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gptpar.config.fields import flag


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
