"""``--offload-gradients auto``: whether a GPU has room for all gradients that the CPU will use. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.config import Config
from gptpar.config.checks.offload import offload_gradients_obstacles
from gptpar.plan.hardware import SUSTAINED, Sustained
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.reporting.banner import format_bytes


@dataclass(frozen=True)
class GradientChoice:
    """What ``auto`` becomes.

    Attributes:
        leave_at_once: whether gradients go to host memory when they are final.
        needed: bytes of the GPU that the run is expected to need if they stay.
        free: bytes of the GPU that the run can have, with the process's context.
    """

    leave_at_once: bool
    needed: float
    free: float

    @property
    def reason(self) -> str:
        """A part of a sentence with both numbers."""
        needed, free = format_bytes(round(self.needed)), format_bytes(round(self.free))
        return f"{needed} are expected to be needed with all gradients on the GPU, and {free} are available"

    def applied_to(self, config: Config) -> Config:
        """The configuration with ``auto`` replaced."""
        return config.update("offload", offload_gradients="on" if self.leave_at_once else "off")


def choose_gradients(job: Job, free: float, sustained: Sustained = SUSTAINED) -> GradientChoice | None:
    """Decide for a job with ``--offload-gradients auto``; ``None``: there is nothing to decide, they stay.

    Where the CPU's ratio is to be found out, too, it counts as 1: only if that does not fit are gradients moved.

    Args:
        free: bytes of the GPU that the job can have, with its process's context.
    """
    config = job.config
    offload = config.offload
    if offload.offload_gradients != "auto" or not offload.cpu_optimizer or offload.ratio == 0:
        return None
    recorded = config.precision.cuda_graph == "on"  # the user has asked for that, and it keeps their memory
    if job.device_type != "cuda" or recorded or any(offload_gradients_obstacles(config.batch, job.layout.world_size)):
        return None
    if offload.ratio == "auto":
        config = config.update("offload", cpu_optimizer_ratio=1.0)
    stay, leave = (
        stage_memory(replace(job, config=config.update("offload", offload_gradients=word)), 0, sustained).total
        for word in ("off", "on")
    )
    return GradientChoice(leave < stay and stay > free, stay, free)
