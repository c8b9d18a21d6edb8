"""``Planner`` makes plans: the memory and the time of a configuration on a cluster."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gptpar.config import Flags
from gptpar.config.fields import flag_name
from gptpar.plan.floors import Floors, floors
from gptpar.plan.gradients import GradientChoice, choose_gradients
from gptpar.plan.hardware import Cluster
from gptpar.plan.host_updates import speculated_elements
from gptpar.plan.job import Job
from gptpar.plan.memory import RankMemory, memory_of_stages
from gptpar.plan.mirror import MirrorCost, mirror_cost
from gptpar.plan.space.candidate import Changes, configured, flags_of
from gptpar.plan.space.dimensions import OFFLOAD_GRADIENTS, SUMMED_SHARE, VIRTUAL_STAGES
from gptpar.plan.timing import StepTime, step_time, utilisation
from gptpar.reporting.banner import format_bytes

RATIO_STEP = 5
"""Difference, in per cent, of the ratios that are tried for ``auto``."""


@dataclass(frozen=True)
class Plan:
    """A job on a cluster.

    Attributes:
        changes: how it differs from the command line.
        gradients: what ``--offload-gradients auto`` became, and why.
        left_out: flags of the command line that it goes without.
    """

    job: Job
    cluster: Cluster
    changes: Changes = field(default_factory=dict)
    gradients: GradientChoice | None = None
    left_out: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Memory of each stage's processes."""
        return memory_of_stages(self.job, self.cluster.sustained)

    @cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        return step_time(self.job, self.cluster)

    @cached_property
    def floors(self) -> Floors:
        """The least time of a step by products, bus and CPU."""
        return floors(self.job, self.cluster)

    @cached_property
    def worst_stage(self) -> int:
        """The stage that needs the most GPU memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @cached_property
    def need(self) -> float:
        """Bytes that every GPU must have."""
        return self.memory[self.worst_stage].total

    @cached_property
    def mirror(self) -> MirrorCost | None:
        """The cost of copies in memory; ``None``: the run makes none."""
        return mirror_cost(self.job, self.cluster)

    @property
    def host_need(self) -> float:
        """Bytes of host memory that the processes of a machine need, with the copies that a machine keeps."""
        processes = min(self.cluster.gpus_per_node, self.job.mesh.world_size)
        copies = 0.0 if self.mirror is None else self.mirror.machine
        return processes * max(memory.host for memory in self.memory) + copies

    @property
    def double_buffers(self) -> float:
        """Bytes of a machine's memory that ``--offload-speculation auto`` takes beside what is needed, if it is free.

        It is no more than what a run may take; 0 where the machine's memory is not known.
        """
        job, cluster = self.job, self.cluster
        if cluster.host_memory is None or job.config.offload.offload_speculation != "auto":
            return 0.0
        taken = [speculated_elements(job, cluster, part) * job.host_state(part).element_bytes for part in job.stages]
        return min(cluster.gpus_per_node, job.mesh.world_size) * max(taken)

    @property
    def fits_gpu(self) -> bool:
        """Whether the GPU's memory suffices."""
        return self.need <= self.cluster.memory

    @property
    def fits_host(self) -> bool:
        """Whether the machines' memory suffices."""
        return self.cluster.host_memory is None or self.host_need <= self.cluster.host_memory

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.fits_gpu and self.fits_host

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.job.config.batch.global_batch_size * self.job.shape.seq_length / self.time.total

    @property
    def gpu_hours(self) -> float:
        """GPU hours of a billion tokens."""
        return self.job.mesh.world_size * 1e9 / self.tokens_per_second / 3600

    @property
    def on_host(self) -> bool:
        """Whether a part of the optimizer or the parameters are in host memory."""
        return bool(self.job.ratio or self.job.config.offload.cpu_parameters)

    @property
    def utilisation(self) -> float:
        """MFU, attention counted over its causal half."""
        return utilisation(self.job, self.cluster, self.time.total)

    @property
    def named_changes(self) -> Changes:
        """The changes with what ``auto`` has changed; default values are left out."""
        changes = {name: value for name, value in self.changes.items() if value != _usual(name)}
        if self.gradients is not None and self.gradients.leave_at_once:
            changes[OFFLOAD_GRADIENTS] = "on"
            if self.gradients.share < 1:
                changes[SUMMED_SHARE] = self.gradients.share
        return changes

    def flags(self) -> str:
        """The named changes as flags, then what is left out of the command line."""
        return " ".join([*flags_of(self.named_changes), *(f"without {flag}" for flag in self.left_out)])

    def shortage(self) -> str:
        """Why it does not fit: a sentence with the numbers; empty if it does."""
        if not self.fits_gpu:
            need, has = format_bytes(self.need), format_bytes(self.cluster.memory)
            return f"a process of stage {self.worst_stage} needs {need} and a GPU has {has}."
        if not self.fits_host and self.cluster.host_memory is not None:
            need, has = format_bytes(self.host_need), format_bytes(self.cluster.host_memory)
            return f"the processes of a machine need {need} of host memory and it has {has}."
        return ""


def _usual(name: str) -> Any:
    """A field's default; that of the number of virtual stages is 1."""
    return 1 if name == VIRTUAL_STAGES else Flags().value(name)


class Planner:
    """Makes plans from one command line.

    Args:
        typed: the command line, with values that a plan needs filled in.
        given: the fields that were typed, as ``section.field``.
        world_size: number of GPUs.
        cluster: the machines.
        document_lengths: see :class:`~gptpar.plan.job.Job`.
        chosen: values in ``typed`` that are not from the command line, because the plan chose them; all plans name
            them.
    """

    def __init__(
        self,
        typed: Flags,
        given: set[str],
        world_size: int,
        cluster: Cluster,
        document_lengths: tuple[int, ...] | None = None,
        chosen: Changes | None = None,
    ):
        self.typed, self.given, self.world_size, self.cluster = typed, given, world_size, cluster
        self.document_lengths, self.chosen = document_lengths, chosen or {}

    def plan(self, changes: Changes | None = None) -> Plan:
        """The plan of the command line with some changes.

        Raises:
            ConfigError: it cannot run, however large the memory.
        """
        changes = {**self.chosen, **(changes or {})}
        config = configured(self.typed.with_values(changes), self.world_size)
        job = Job(config, config.parallel.mesh(self.world_size), document_lengths=self.document_lengths)
        back = [name for name, value in changes.items() if value == _usual(name) != self.typed.value(name)]
        left_out = tuple(flag_name(name.split(".")[1]) for name in back if name in self.given)
        plan = self._with_gradients(Plan(job, self.cluster, changes, left_out=left_out))
        return self._with_least_ratio(plan) if config.offload.ratio == "auto" else plan

    def _with_gradients(self, plan: Plan) -> Plan:
        """The plan with ``--offload-gradients auto`` decided as the run decides it."""
        choice = choose_gradients(plan.job, self.cluster.memory, self.cluster.sustained)
        if choice is None:
            return plan
        return replace(plan, job=replace(plan.job, config=choice.applied_to(plan.job.config)), gradients=choice)

    def _with_least_ratio(self, plan: Plan) -> Plan:
        """The plan with the smallest ratio that fits the GPU, as ``--cpu-optimizer-ratio auto`` finds it; or with 1.

        The larger the ratio, the less the GPU needs, from the first step on. A ratio of 0 is a case of its own: then
        the parameters themselves may be the master weights, which takes less than separate ones.
        """

        def at(percent: int) -> Plan:
            config = plan.job.config.update("offload", cpu_optimizer_ratio=percent / 100)
            return replace(plan, job=replace(plan.job, config=config))

        if (nothing := at(0)).fits_gpu:
            return nothing
        percents = range(RATIO_STEP, 100, RATIO_STEP)
        number = bisect.bisect_left(percents, True, key=lambda percent: at(percent).fits_gpu)
        return at(RATIO_STEP * (number + 1))
