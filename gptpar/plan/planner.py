"""Plans: a configuration on a cluster, judged; what to change where it does not fit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gptpar.config import Config, ParallelConfig
from gptpar.config.derive import derive, padded_vocab
from gptpar.config.fields import flag_name
from gptpar.config.validate import find_problems
from gptpar.errors import ConfigError
from gptpar.plan.gradients import GradientChoice, choose_gradients
from gptpar.plan.hardware import Cluster
from gptpar.plan.job import Job
from gptpar.plan.memory import RankMemory, stage_memory
from gptpar.plan.timing import StepTime, step_time, utilisation
from gptpar.reporting.banner import format_bytes
from gptpar.topology.layout import Layout

Changes = Mapping[str, Any]
"""``section.field`` -> value, over what the command line says."""

_CHUNKS_FIELD = "num_virtual_stages_per_pipeline_rank"
_CPU_OPTIMIZER: Changes = {"offload.cpu_optimizer": True, "offload.cpu_optimizer_ratio": "auto"}
_CPU_PARAMETERS: Changes = {"offload.cpu_parameters": True}
_RECOMPUTED: Changes = {"recompute.recompute_granularity": "full", "recompute.recompute_modules": None}
SEARCHED = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    f"parallel.{_CHUNKS_FIELD}",
    "parallel.zero_stage",
    "parallel.sequence_parallel",
    "parallel.pipeline_partition_method",
    "batch.micro_batch_size",
    "recompute.recompute_granularity",
)
"""What a search chooses, unless the command line says it."""
RATIO_STEP = 5
"""Per cent between the host shares that are tried for ``auto``."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)
MOST_STAGES = 64
MOST_PARTS = 48
"""Of an interleaved pipeline in a search: balancing more takes a second each."""


@dataclass(frozen=True)
class Plan:
    """A job on a cluster.

    Attributes:
        changes: how it differs from the command line.
        gradients: what ``--offload-gradients auto`` became, and why.
    """

    job: Job
    cluster: Cluster
    changes: Changes = field(default_factory=dict)
    gradients: GradientChoice | None = None

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Of each stage's processes."""
        return [stage_memory(self.job, stage, self.cluster.sustained) for stage in range(self.job.layout.pipeline)]

    @cached_property
    def time(self) -> StepTime:
        """Of a step."""
        return step_time(self.job, self.cluster)

    @cached_property
    def worst_stage(self) -> int:
        """The stage that needs the most GPU memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @cached_property
    def need(self) -> float:
        """Bytes that every GPU must have."""
        return self.memory[self.worst_stage].total

    @property
    def host_need(self) -> float:
        """Bytes of host memory that the processes of a machine need."""
        processes = min(self.cluster.gpus_per_node, self.job.layout.world_size)
        return processes * max(memory.host for memory in self.memory)

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
        """Of all GPUs."""
        return (self.job.config.batch.global_batch_size or 1) * self.job.shape.seq_length / self.time.total

    @property
    def utilisation(self) -> float:
        """MFU, attention counted over its causal half."""
        return utilisation(self.job, self.cluster, self.time.total)

    def flags(self) -> str:
        """The changes as flags, without those that say what is so anyway, and what ``auto`` has changed."""
        words = []
        for name, value in self.changes.items():
            section, key = name.split(".")
            usual = getattr(getattr(Config(), section), key)
            if value == usual or value is None or (key == _CHUNKS_FIELD and value == 1):
                continue
            words.append(flag_name(key) + ("" if value is True else f" {value}"))
        if self.gradients is not None and self.gradients.leave_at_once:
            words.append("--offload-gradients on")
        return " ".join(words)

    def shortage(self) -> str:
        """Why it does not fit: a sentence with the numbers; empty if it does."""
        if not self.fits_gpu:
            need, has = format_bytes(self.need), format_bytes(self.cluster.memory)
            return f"a process of stage {self.worst_stage} needs {need} and a GPU has {has}."
        if not self.fits_host and self.cluster.host_memory is not None:
            need, has = format_bytes(self.host_need), format_bytes(self.cluster.host_memory)
            return f"the processes of a machine need {need} of host memory and it has {has}."
        return ""


class Planner:
    """Makes plans from one command line.

    Args:
        config: as typed, with what a plan needs filled in.
        given: the fields that were typed, as ``section.field``.
        world_size: number of GPUs.
    """

    def __init__(self, config: Config, given: set[str], world_size: int, cluster: Cluster):
        self.config, self.given, self.world_size, self.cluster = config, given, world_size, cluster

    def plan(self, changes: Changes | None = None) -> Plan:
        """The command line with some changes.

        Raises:
            ConfigError: it cannot run, whatever the memory.
        """
        config = self.config
        for name, value in (changes or {}).items():
            section, key = name.split(".")
            config = config.update(section, **{key: value})
        config, _ = derive(config, self.world_size)
        problems = find_problems(config, self.world_size)
        if problems:
            raise ConfigError(problems)
        model, parallel = config.model, config.parallel
        vocabulary = padded_vocab(config.tokenizer.vocab_size or 0, model.make_vocab_size_divisible_by)
        config = config.update("model", padded_vocab_size=vocabulary)
        layout = Layout(
            parallel.data_parallel_size(self.world_size),
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        plan = self._with_gradients(Plan(Job(config, layout), self.cluster, changes or {}))
        return plan if config.offload.ratio is not None else self._with_least_ratio(plan)

    def _with_gradients(self, plan: Plan) -> Plan:
        """With ``--offload-gradients auto`` decided as the run decides it."""
        choice = choose_gradients(plan.job, self.cluster.memory, self.cluster.sustained)
        if choice is None:
            return plan
        return replace(plan, job=replace(plan.job, config=choice.applied_to(plan.job.config)), gradients=choice)

    def _with_least_ratio(self, plan: Plan) -> Plan:
        """The smallest host share with which it fits the GPU, as ``--cpu-optimizer-ratio auto`` finds it; or 1.

        From the first step on, the need falls with the share. Nothing on the host is a case of its own: masters that
        are the parameters themselves need less than those beside them.
        """

        def at(percent: int) -> Plan:
            config = plan.job.config.update("offload", cpu_optimizer_ratio=f"{percent / 100:g}")
            return replace(plan, job=replace(plan.job, config=config))

        if (nothing := at(0)).fits_gpu:
            return nothing
        percents = range(RATIO_STEP, 100, RATIO_STEP)
        number = bisect.bisect_left(percents, True, key=lambda percent: at(percent).fits_gpu)
        return at(RATIO_STEP * (number + 1))

    def remedies(self, plan: Plan) -> list[Plan]:
        """Changes that lower the need for memory: those with which it fits, fastest first, then the others.

        Each is a single one, but for the last resorts where none suffices.
        """
        single = list(_single_changes(plan))
        found = list(self._with_less(plan, single))
        if not any(changed.fits for changed in found):
            found += self._with_less(plan, [changes for changes in _last_resorts(plan) if changes not in single])
        return sorted(found, key=lambda p: (not p.fits, p.time.total if p.fits else p.need))

    def _with_less(self, plan: Plan, several: Iterable[Changes]) -> Iterator[Plan]:
        """Those of several changes that can be had and need less memory than a plan."""
        for changes in several:
            try:
                changed = self.plan(changes)
            except ConfigError:
                continue
            if changed.need < plan.need or changed.host_need < plan.host_need:
                yield changed

    def candidates(self) -> Iterator[Changes]:
        """All layouts that a search looks at; what was typed stays as it is."""
        names = SEARCHED
        for tensor in self._choices(names[0], _powers_of_two(min(self.cluster.gpus_per_node, self.world_size))):
            for pipeline in self._choices(names[1], _divisors(self.world_size // max(1, tensor), MOST_STAGES)):
                chunks = [c for c in CHUNKS if c == 1 or (pipeline > 1 and c * pipeline <= MOST_PARTS)]
                stages = range(4) if self.world_size > tensor * pipeline else range(1)
                rest = (
                    self._choices(names[2], chunks),
                    self._choices(names[3], stages),
                    self._choices(names[4], [tensor > 1]),
                    self._choices(names[5], ["flops" if pipeline > 1 else ParallelConfig.pipeline_partition_method]),
                    self._choices(names[6], MICRO_BATCH_SIZES),
                    self._choices(names[7], [None, "full"]),
                )
                for values in itertools.product(*rest):
                    changes = dict(zip(names, (tensor, pipeline, *values), strict=True))
                    yield {name: value for name, value in changes.items() if name not in self.given}

    def offloads(self) -> Iterator[Changes]:
        """What a search moves to host memory, the fastest first; what was typed stays as it is.

        With the optimizer go its gradients: by ``--offload-gradients auto``, when they are used or when they are final.
        """
        found: list[Changes] = [{}]
        for more in (_CPU_OPTIMIZER, _CPU_PARAMETERS):
            found.append({**found[-1], **{name: value for name, value in more.items() if name not in self.given}})
        return (changes for number, changes in enumerate(found) if changes not in found[:number])

    def on_host(self, offload: Changes) -> tuple[str, ...]:
        """What is in host memory with these changes to the command line, in words."""
        typed = self.config.offload
        wanted = {
            "the optimizer": offload.get("offload.cpu_optimizer", typed.cpu_optimizer),
            "the parameters": offload.get("offload.cpu_parameters", typed.cpu_parameters),
        }
        return tuple(words for words, moved in wanted.items() if moved)

    def _choices(self, name: str, choices: Any) -> list[Any]:
        section, key = name.split(".")
        recompute_given = section == "recompute" and any(field.startswith("recompute.") for field in self.given)
        chunks_given = key == _CHUNKS_FIELD and "parallel.num_layers_per_virtual_pipeline_stage" in self.given
        if name in self.given or recompute_given or chunks_given:
            return [getattr(getattr(self.config, section), key)]
        return list(choices)


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [i for i in range(1, min(number, most) + 1) if number % i == 0]


def _single_changes(plan: Plan) -> Iterator[Changes]:
    parallel, layout = plan.job.config.parallel, plan.job.layout
    if plan.job.config.recompute.checkpoint_in_cpu and not plan.fits_host:
        yield {**plan.changes, "recompute.checkpoint_in_cpu": False}
    if plan.job.config.recompute.recompute_granularity != "full":
        yield {**plan.changes, **_RECOMPUTED}
    yield from _offloads(plan)
    if plan.job.micro_batch_size > 1:
        yield {**plan.changes, "batch.micro_batch_size": plan.job.micro_batch_size // 2}
    if layout.data > 1:
        for stage in range(plan.job.zero_stage + 1, 4):
            yield {**plan.changes, "parallel.zero_stage": stage}
    if layout.tensor > 1 and not parallel.sequence_parallel:
        yield {**plan.changes, "parallel.sequence_parallel": True}
    for name, size in (("tensor", layout.tensor), ("pipeline", layout.pipeline)):
        yield {**plan.changes, f"parallel.{name}_model_parallel_size": 2 * size}


def _offloads(plan: Plan) -> Iterator[Changes]:
    """What leaves the GPU for the host's memory: the optimizer, its gradients at once, the parameters."""
    offload = plan.job.config.offload
    if plan.fits_gpu:
        return
    if plan.job.ratio < 1:
        yield {**plan.changes, **_CPU_OPTIMIZER}
    if offload.cpu_optimizer and not offload.gradients_leave_at_once:
        yield {**plan.changes, "offload.offload_gradients": "on"}
    if not offload.cpu_parameters:
        yield {**plan.changes, **_CPU_PARAMETERS}


def _last_resorts(plan: Plan) -> Iterator[Changes]:
    """Everything that can go to host memory does; the same with all activations of the blocks recomputed."""
    if plan.fits_gpu:
        return
    moved = {**plan.changes, **(_CPU_OPTIMIZER if plan.job.ratio < 1 else {}), **_CPU_PARAMETERS}
    yield moved
    if plan.job.config.recompute.recompute_granularity != "full":
        yield {**moved, **_RECOMPUTED}
