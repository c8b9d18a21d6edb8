"""Turns finished steps into records with speeds, MFU and time left, for the console and all logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from gptpar.config import Config
from gptpar.engine.readings import TimingEvent
from gptpar.model.gpt import gpt_model
from gptpar.plan.hardware import mfu, peak_flops
from gptpar.reporting.console import iteration_line, short_line, task_line, timing_line, validation_lines
from gptpar.reporting.records import CpuOptimizerTimes, IterationRecord, MemoryStats, TaskRecord, ValidationRecord
from gptpar.reporting.sinks import Sink
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.progress import Progress
from gptpar.run.trainer import Step
from gptpar.system.host import process_memory
from gptpar.system.restart import Restart

SPEEDS = ("tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "mfu_causal")
"""Fields of a record that grow as a step takes less time."""


@dataclass(frozen=True)
class StepNumbers:
    """A finished step, read back from the device.

    Attributes:
        skipped: because the gradient was not finite.
        is_outlier: skipped, too, but for its loss or norm.
    """

    step: Step
    loss: float
    grad_norm: float
    skipped: bool
    params_norm: float | None = None
    num_zeros: int | None = None
    cpu_optimizer: CpuOptimizerTimes | None = None
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    is_outlier: bool = False


def device_peak(number_format: str, device: torch.device) -> float | None:
    """Peak FLOP/s of the device in the run's number format, where it is known."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), number_format)


@dataclass
class Reporter:
    """Reports finished steps; only the main process has one that prints and writes.

    Args:
        plan: sizes and number of steps.
        world_size: number of processes.
        sinks: where records go besides the console.
        say: prints a line.
        document_lengths: see :class:`~gptpar.tensor_parallel.cost.BatchShape`; MFU counts what tokens see.
    """

    config: Config
    plan: BatchPlan
    world_size: int
    device: torch.device
    sinks: Sequence[Sink]
    say: Callable[[str], None]
    document_lengths: tuple[int, ...] | None = None
    _window: list[IterationRecord] = field(default_factory=list)
    _first: bool = True

    def __post_init__(self) -> None:
        self._peak, model = device_peak(self.config.precision.dtype, self.device), gpt_model(self.config.model)
        count = partial(model.flops_per_token, document_lengths=self.document_lengths)
        self._flops, self._causal_flops = (count(causal=causal) for causal in (False, True))
        self._restarts = Restart.of_worker().number
        self.follow(self.plan)
        self._since = TimingEvent(self.device)

    def follow(self, plan: BatchPlan) -> None:
        """Follow another length of the run from now on."""
        self.plan, self._num_iterations = plan, plan.num_iterations()

    def restart_clock(self) -> None:
        """Leave the time since the last step (an evaluation, a save) out of the step times."""
        self._since = TimingEvent(self.device)

    def step(self, numbers: StepNumbers, progress: Progress, max_seconds: float = math.inf) -> None:
        """Report a finished step.

        Args:
            progress: it includes the step.
            max_seconds: from now on; the run ends then, if not before.
        """
        now = numbers.step.readings.event
        elapsed, self._since = now.seconds_since(self._since), now
        record = self._record(numbers, progress, elapsed)
        self._window.append(record)
        for sink in self.sinks:
            sink.iteration(replace(record, eta_s=min(record.eta_s, max_seconds)))
        due = record.iteration % self.config.logging.log_interval == 0
        if due or self._first or record.iteration == self._num_iterations:
            averaged = self._averaged()
            averaged = replace(averaged, eta_s=min(averaged.eta_s, max_seconds))
            log = self.config.logging
            line = short_line if log.log_lines == "short" else iteration_line
            self.say(line(averaged, log_throughput=log.log_throughput))
            if self.config.logging.timing_log_level:
                self.say(timing_line(averaged))
            # The first step's time holds compilation and warm-up, so it is not averaged with later ones.
            self._window.clear()
            self._first = False

    def _record(self, numbers: StepNumbers, progress: Progress, elapsed: float) -> IterationRecord:
        shape, step = self.config.model, numbers.step
        tokens_per_s = step.samples * shape.seq_length / elapsed
        per_gpu = tokens_per_s / self.world_size
        left = max(0, self.plan.train_samples - progress.consumed_samples)
        return IterationRecord(
            iteration=step.iteration,
            train_iters=self._num_iterations,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * shape.seq_length,
            elapsed_ms=elapsed * 1e3,
            learning_rate=step.learning_rate,
            global_batch_size=step.samples,
            lm_loss=numbers.loss,
            loss_scale=step.loss_scale,
            grad_norm=numbers.grad_norm,
            num_skipped=int(numbers.skipped),
            num_nan=int(not math.isfinite(numbers.loss)),
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=per_gpu,
            tflops_per_gpu=per_gpu * self._causal_flops / 1e12,
            mfu=mfu(per_gpu, self._flops, self._peak),
            mfu_causal=mfu(per_gpu, self._causal_flops, self._peak),
            progress=min(1.0, progress.consumed_samples / max(1, self.plan.train_samples)),
            eta_s=left / step.samples * elapsed,
            params_norm=numbers.params_norm,
            num_zeros=numbers.num_zeros,
            memory=self._memory(),
            host_bytes=process_memory() if self.config.logging.log_memory_to_tensorboard else None,
            cpu_optimizer=numbers.cpu_optimizer,
            restarts=self._restarts,
            auxiliary_losses=numbers.auxiliary_losses,
            num_outliers=None if self.config.health.skip_step_sigma is None else int(numbers.is_outlier),
            first_sample=progress.consumed_samples - step.samples,
            layer_norms={
                f"{kind}/{layer}": norm for kind, of in step.layer_norms.items() for layer, norm in of.items()
            },
        )

    def _memory(self) -> MemoryStats | None:
        if self.device.type != "cuda" or not self.config.logging.log_memory_to_tensorboard:
            return None
        stats = torch.cuda.memory_stats(self.device)
        return MemoryStats(
            reserved_bytes=stats["reserved_bytes.all.current"],
            allocated_bytes=stats["allocated_bytes.all.current"],
            max_allocated_bytes=stats["allocated_bytes.all.peak"],
            allocated_count=stats["allocation.all.current"],
        )

    def _averaged(self) -> IterationRecord:
        """The window as one record: times and losses averaged, skips summed, the rest as in the last step."""
        window, last = self._window, self._window[-1]
        ms = _mean([r.elapsed_ms for r in window])
        speed = last.elapsed_ms / ms * sum(r.global_batch_size for r in window) / len(window) / last.global_batch_size
        speeds = {name: value for name in SPEEDS if (value := getattr(last, name)) is not None}
        averaged = replace(
            last,
            elapsed_ms=ms,
            eta_s=last.eta_s / speed,
            num_skipped=sum(r.num_skipped for r in window),
            num_nan=sum(r.num_nan for r in window),
            num_outliers=_sum_known([r.num_outliers for r in window]),
            cpu_optimizer=averaged_times([r.cpu_optimizer for r in window]),
            **{name: value * speed for name, value in speeds.items()},
        )
        return _with_averaged_losses(averaged, [r for r in window if not r.num_skipped and r.lm_loss is not None])

    def validation(self, record: ValidationRecord) -> None:
        """Report an evaluation."""
        self.say(validation_lines(record))
        for sink in self.sinks:
            sink.validation(record)

    def task(self, record: TaskRecord) -> None:
        """Report the scores of a task."""
        self.say(task_line(record))
        for sink in self.sinks:
            sink.task(record)

    def flush(self) -> None:
        """Write what the sinks keep in memory to the disk, as a checkpoint does with the state."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """Flush and close the sinks."""
        for sink in self.sinks:
            sink.close()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sum_known(values: Sequence[int | None]) -> int | None:
    """The sum of the known values; ``None`` where none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _with_averaged_losses(record: IterationRecord, good: Sequence[IterationRecord]) -> IterationRecord:
    """The record with the mean losses of ``good``; without a loss where there are none."""
    if not good:
        return replace(record, lm_loss=None, auxiliary_losses={})
    return replace(
        record,
        lm_loss=_mean([r.lm_loss or 0.0 for r in good]),
        auxiliary_losses={name: _mean([r.auxiliary_losses[name] for r in good]) for name in record.auxiliary_losses},
    )


def averaged_times(found: Sequence[CpuOptimizerTimes | None]) -> CpuOptimizerTimes | None:
    """The mean of measured times; counts are added up."""
    times = [one for one in found if one is not None]
    if not times:
        return None
    waited, busy, updating = map(_mean, zip(*((t.waited, t.busy, t.updating) for t in times), strict=True))
    counts = zip(*((t.redone, t.num_updated, t.num_ahead) for t in times), strict=True)
    return CpuOptimizerTimes(waited, busy, updating, *map(sum, counts))
