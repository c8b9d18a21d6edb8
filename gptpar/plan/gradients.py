"""Decides what ``--offload-gradients auto`` becomes: on if the GPU has no room for the gradients. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.config import Config
from gptpar.config.sections.offload import offload_gradients_obstacles
from gptpar.plan.hardware import SUSTAINED, Sustained
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.reporting.banner import format_bytes

SHARES = (0.25, 0.5, 0.75)
"""Shares of the layers whose gradients the host adds up. ``auto`` tries them in this order, then all layers: a smaller
share is faster."""

MARGIN = 0.05
"""Fraction of the GPU's memory that each of ``SHARES`` has to leave free, because the prediction has an error."""


@dataclass(frozen=True)
class GradientChoice:
    """The decision that ``--offload-gradients auto`` becomes.

    Attributes:
        leave_at_once: whether gradients are copied to host memory as soon as they are final.
        share: of the layers whose gradients over micro-batches are added up there, if they are.
        needed: bytes of GPU memory that the run is expected to need if they stay.
        free: bytes of GPU memory that the run can have, including the process's context.
    """

    leave_at_once: bool
    needed: float
    free: float
    share: float = 1.0

    @property
    def reason(self) -> str:
        """The needed and the free bytes, as a part of a sentence."""
        needed, free = format_bytes(round(self.needed)), format_bytes(round(self.free))
        return f"{needed} are expected to be needed with all gradients on the GPU, and {free} are available"

    def applied_to(self, config: Config) -> Config:
        """The configuration with ``auto`` replaced."""
        word = "on" if self.leave_at_once else "off"
        return config.update("offload", offload_gradients=word, offload_gradients_ratio=self.share)


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

    def needed(word: str, share: float = 1.0) -> float:
        changed = config.update("offload", offload_gradients=word, offload_gradients_ratio=share)
        return stage_memory(replace(job, config=changed), 0, sustained).total

    stay = needed("off")
    if stay <= free or needed("on") >= stay:
        return GradientChoice(False, stay, free)
    shares = SHARES if config.batch.adds_gradients(1) else ()
    fitting = (share for share in shares if needed("on", share) <= free * (1 - MARGIN))
    return GradientChoice(True, stay, free, next(fitting, 1.0))
