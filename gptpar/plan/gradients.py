"""Decides ``--offload-gradients auto``: has a GPU room for all gradients that the CPU will use? Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.config import Config
from gptpar.config.sections.offload import offload_gradients_obstacles
from gptpar.plan.hardware import SUSTAINED, Sustained
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.reporting.banner import format_bytes


@dataclass(frozen=True)
class GradientChoice:
    """The decision that ``--offload-gradients auto`` becomes.

    Attributes:
        leave_at_once: whether gradients are copied to host memory as soon as they are final.
        needed: bytes of GPU memory that the run is expected to need if they stay.
        free: bytes of GPU memory that the run can have, including the process's context.
    """

    leave_at_once: bool
    needed: float
    free: float

    @property
    def reason(self) -> str:
        """The needed and the free bytes, as a part of a sentence."""
        needed, free = format_bytes(round(self.needed)), format_bytes(round(self.free))
        return f"{needed} are expected to be needed with all gradients on the GPU, and {free} are available"

    def applied_to(self, config: Config) -> Config:
        """The configuration with ``auto`` replaced."""
        return config.update("offload", offload_gradients="on" if self.leave_at_once else "off")


def choose_gradients(job: Job, free: float, sustained: Sustained = SUSTAINED) -> GradientChoice | None:
    """Decide for a job with ``--offload-gradients auto``; ``None`` if there is nothing to decide, and gradients stay.

    If the CPU's ratio is ``auto``, too, it counts as 1: gradients leave at once only if the job does not fit with that.

    Args:
        free: bytes of GPU memory that the job can have, including its process's context.
        sustained: costs that the data sheet does not list.
    """
    config = job.config
    offload = config.offload
    if offload.offload_gradients != "auto" or not offload.cpu_optimizer or offload.ratio == 0:
        return None
    recorded = config.precision.cuda_graph == "on"  # a graph, which the user asked for, keeps the gradients' memory
    # Several processes would have to decide alike: their messages differ.
    several = job.mesh.world_size > 1
    if job.device_type != "cuda" or recorded or several or any(offload_gradients_obstacles(config, 1)):
        return None
    if offload.ratio == "auto":
        config = config.update("offload", cpu_optimizer_ratio=1.0)
    stay, leave = (
        stage_memory(replace(job, config=config.update("offload", offload_gradients=word)), 0, sustained).total
        for word in ("off", "on")
    )
    return GradientChoice(leave < stay and stay > free, stay, free)
