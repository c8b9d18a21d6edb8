"""``Run``: a pretraining run's loop, and what happens after each step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gptpar.config import Config
from gptpar.data.loader import MicroBatch
from gptpar.errors import GptparError
from gptpar.model.experts.dispatch import LIMIT
from gptpar.optim.schedule import make_schedule
from gptpar.optim.skip_step import NOT_FINITE, OUTLIER
from gptpar.reporting.records import CpuOptimizerTimes, ValidationRecord
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Loaders
from gptpar.run.evaluation.in_run import TaskEvaluation
from gptpar.run.evaluation.tasks import Task
from gptpar.run.fitted_length import FittedLength
from gptpar.run.health.layer_norms import GRADIENT, WEIGHTS
from gptpar.run.health.replicas import ReplicaCheck
from gptpar.run.health.spikes import Spike, SpikeBundles
from gptpar.run.mirror import Mirror
from gptpar.run.progress import Progress
from gptpar.run.reporter import Reporter, StepNumbers
from gptpar.run.saving import Saving
from gptpar.run.trainer import Step, Trainer
from gptpar.run.votes import Votes
from gptpar.system.garbage import LongLived
from gptpar.system.stop import StopRequest

MAX_SKIPPED_IN_A_ROW = 100
"""A dynamic loss scale of 2^32 may need 32 overflows to find its level. A run that skips this many has diverged."""


class StepListener:
    """Follows a run's steps from outside; this one does nothing."""

    def begin(self) -> None: ...

    def step(self) -> None: ...

    def end(self) -> None: ...


@dataclass
class Run:
    """All objects of a run. :meth:`train` is its loop.

    Attributes:
        saving: when and where checkpoints are saved.
        mirror: copies of the state in memory.
        tasks: to evaluate on, beside validation data.
    """

    trainer: Trainer
    progress: Progress
    plan: BatchPlan
    loaders: Loaders
    reporter: Reporter
    request: StopRequest
    say: Callable[[str], None]
    started: float
    saving: Saving
    mirror: Mirror | None = None
    tasks: Sequence[Task] = ()
    skipped_in_a_row: int = 0
    cpu_optimizer_before: tuple[float, float, float, int, int, int] = (0.0, 0.0, 0.0, 0, 0, 0)
    evaluated_at: dict[str, int] = field(default_factory=dict)
    said_that_all_are_kept: bool = False
    fitted_length: FittedLength | None = None

    def __post_init__(self) -> None:
        self.replicas = ReplicaCheck(self.trainer.engine, self.trainer.topology)
        self.on_tasks = TaskEvaluation(
            self.tasks, self.trainer, lambda record: self.reporter.task(record), self.say, self.is_to_stop
        )

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.trainer.config

    def train(self, each_step: StepListener | None = None) -> None:
        """Step until the plan is finished or somebody asks to stop; evaluate and save on the way.

        The numbers of a step are read while the device works on the next one, so nothing ever waits for a reading.

        Args:
            each_step: called when the loop begins, after each step's launch, and when the device has finished.
        """
        listener = each_step or StepListener()
        listener.begin()
        with LongLived() as long_lived:
            self._take_steps(listener, long_lived)
        listener.end()
        self.saving.save_last(self.progress, keep_all=self._keeps_all())

    def _take_steps(self, listener: StepListener, long_lived: LongLived) -> None:
        loader = self.loaders["train"]
        assert loader is not None
        self.reporter.restart_clock()
        self.fitted_length = FittedLength.of(self.config.batch, self.progress)
        launched: Step | None = None
        stop = False
        while not stop and not self.plan.finished(self.progress):
            samples = self.plan.global_batch_size(self.progress.consumed_samples)
            batches = loader.fetch(self.progress.consumed_samples, samples)
            self.trainer.expect_step(self._position(0 if launched is None else launched.samples))
            loss = self.forward_backward(batches)
            if launched is not None:
                stop = self.finish(launched)
            launched = self.launch_update(loss, samples)
            listener.step()
            long_lived.after_step()
            if self.reads_at_once() or self.something_is_due() or stop:
                stop |= self.finish(launched)
                launched = None
                stop |= not self.do_what_is_due()
                stop |= self._is_multiple(self.config.batch.exit_interval)
        if launched is not None:
            self.finish(launched)

    def forward_backward(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """This process's mean loss of a step's micro-batches."""
        before = self.trainer.steps_done_again
        loss = self.trainer.forward_backward(batches, self.progress.iteration)
        if (now := self.trainer.steps_done_again) > before:
            self.say(
                f" > iteration {self.progress.iteration + 1} was computed again without the graph: the experts of a "
                f"process got more than {LIMIT:g} times their mean of tokens ({now} such step(s) so far"
                + (")" if self.trainer.limits_rows else "; from now on, steps are not recorded)")
            )
        return loss

    def launch_update(self, loss: torch.Tensor, samples: int) -> Step:
        """Launch the optimizer step and move on in the data."""
        p, position = self.progress, self._position()
        p.iteration += 1
        p.consumed_samples += samples
        return self.trainer.update(
            loss,
            iteration=p.iteration,
            samples=samples,
            progress=position,
            stop=self.wants_to_stop(),
            saves=self.saving.votes(),
        )

    def _position(self, coming: int = 0) -> float:
        """The position in the schedules, in their unit; ``coming``: samples of the step under way, as if it counts."""
        in_samples = self.progress.scheduled_samples + coming
        return in_samples * (self.config.model.seq_length if self.trainer.schedule.in_tokens else 1)

    def finish(self, step: Step) -> bool:
        """Read and report the numbers of a step that was launched; returns whether any process wants to stop."""
        loss, grad_norm, skipped, votes, *auxiliary = step.readings.read()
        numbers = StepNumbers(
            step,
            loss,
            grad_norm,
            skipped == NOT_FINITE,
            *self.optional_numbers(),
            cpu_optimizer=self._cpu_optimizer_times(),
            auxiliary_losses=dict(zip(self.trainer.names_of_numbers, auxiliary, strict=True)),
            is_outlier=skipped == OUTLIER,
        )
        if numbers.is_outlier:
            self._keep_spike(step, loss, grad_norm)
        self.progress.skipped_iterations += numbers.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if numbers.skipped else 0
        self.progress.nan_iterations += not math.isfinite(loss)
        self.progress.scheduled_samples += 0 if numbers.skipped else step.samples
        undecided = self.fitted_length if self.progress.fitted_iters is None else None
        self.reporter.step(numbers, self.progress, undecided.seconds_left() if undecided else math.inf)
        self.trainer.loss_scale.update(numbers.skipped)
        if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise GptparError(
                f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to iteration "
                f"{step.iteration}: the run has diverged; go on from an earlier checkpoint (--ckpt-step) with a lower "
                "--lr or a longer warm-up."
            )
        if self.fitted_length is not None and self.fitted_length.is_due():
            self.fit_length(self.fitted_length)
        asked = Votes.of(votes)
        self.saving.take_votes(asked.saves)
        self.saving.poll()
        return asked.stop

    def _keep_spike(self, step: Step, loss: float, grad_norm: float) -> None:
        """Report an outlier; all processes measure it, and the main one writes its bundle."""
        skip_step, layers = self.trainer.skip_step, self.trainer.layer_norms
        assert skip_step is not None
        norms = dict(step.layer_norms)
        if self.trainer.keeps_spikes and step.squares is not None:
            norms |= {GRADIENT: layers.of_gradients(step.squares.read(), step.loss_scale), WEIGHTS: layers.of_weights()}
        window = skip_step.window(of_last=True)  # the next step is not judged yet
        spike = Spike(
            step.iteration,
            loss,
            grad_norm,
            self.progress.consumed_samples - step.samples,
            step.samples,
            window["losses"],
            window["norms"],
            norms,
        )
        self.say(f" > {spike.sentence()}")
        loader, folder = self.loaders["train"], self.config.checkpoint.save
        if self.trainer.keeps_spikes and self.trainer.topology.is_main and loader is not None and folder is not None:
            SpikeBundles(Path(folder), loader, self.config, self.say).keep(spike)

    def fit_length(self, length: FittedLength) -> None:
        """Decide the number of steps; all processes take the mean of their times, and so the same number."""
        seconds, left = (
            self.trainer.topology.sum_over_all(torch.tensor([*length.measured()], dtype=torch.float64))
            / self.trainer.topology.mesh.world_size
        ).tolist()
        # Where numbers are read a step late, the next step is under way already.
        taken = self.progress.iteration + (0 if self.reads_at_once() else 1)
        before = self.progress.fitted_iters or 0
        self.progress.fitted_iters, sentence = length.decide(taken, seconds, left)
        if abs(self.progress.fitted_iters - before) > before / 20:  # the lines of iterations show small changes
            self.say(f" > {sentence}")
        configured = BatchPlan.as_configured(self.config.batch, self.progress)
        self.plan = configured.ending_at(self.progress.fitted_iters, self.progress)
        self.reporter.follow(self.plan)
        self.trainer.schedule = schedule = make_schedule(self.config, self.plan.train_samples)
        if schedule.warmup + schedule.wsd_tail >= schedule.total:
            self.say(" > warm-up and decay are as long as the run that fits: --lr is never reached, or left at once")

    def optional_numbers(self) -> tuple[float | None, int | None]:
        """(norm of the parameters, zeros in the gradient), if flags ask for them: reading them waits for the device."""
        log, model, topology = self.config.logging, self.trainer.engine, self.trainer.topology
        norm = zeros = None
        if log.log_params_norm:
            norm = topology.sum_over_all(model.optimizer.square_of_weights()).sqrt().item()
        if log.log_num_zeros_in_grad:
            zeros = round(topology.sum_over_all(model.own_zeros()).item())
        return norm, zeros

    def _cpu_optimizer_times(self) -> CpuOptimizerTimes | None:
        """The CPU optimizer's times since the last call."""
        host = self.trainer.host
        if host is None:
            return None
        before = self.cpu_optimizer_before
        self.cpu_optimizer_before = now = (host.waited_s, *host.busy_s(), host.num_redone, *host.updates())
        waited, busy, updating, *counts = (after - earlier for earlier, after in zip(before, now, strict=True))
        return CpuOptimizerTimes(waited * 1e3, busy * 1e3, updating * 1e3, *map(int, counts))

    def reads_at_once(self) -> bool:
        """Whether a step's numbers cannot wait for the next step.

        On a CPU, a step is done when the call returns. A dynamic loss scale must be known before the next step. Zeros
        are counted in the gradient, which the next step overwrites.
        """
        on_cpu = self.trainer.topology.device.type == "cpu"
        return on_cpu or self.trainer.loss_scale.dynamic or self.config.logging.log_num_zeros_in_grad

    def wants_to_stop(self) -> bool:
        """Whether this process was asked to stop, its time is over, or the file of ``--kill-switch-path`` is there."""
        limit = self.config.batch.exit_duration_in_mins
        late = limit is not None and (time.monotonic() - self.started) / 60 > limit
        switch = self.config.batch.kill_switch_path if self.trainer.topology.is_main else None
        return late or self.request.signal is not None or (switch is not None and os.path.exists(switch))

    def is_to_stop(self) -> bool:
        """Whether any process was asked to stop. A signal may reach some processes only: all must ask, and agree."""
        return self.trainer.topology.any_rank(self.request.signal is not None)

    def something_is_due(self) -> bool:
        """Whether the step just launched is followed by an evaluation, a save or the end."""
        intervals = (
            self._eval_interval(),
            self.on_tasks.interval,
            self.config.batch.exit_interval,
            self.config.health.check_replicas_interval,
        )
        due = self.saving.is_due(self.progress.iteration) or self._mirror_is_due()
        return due or any(self._is_multiple(one) for one in intervals)

    def _mirror_is_due(self) -> bool:
        """Whether the mirror copies the state after this step.

        Not after the last step, which a save follows: a restart from such a copy would have no step, and save nothing.
        """
        due = self.mirror is not None and self.mirror.is_due(self.progress.iteration)
        return due and not self.plan.finished(self.progress)

    def do_what_is_due(self) -> bool:
        """Check replicas, save and evaluate at their intervals; an evaluation may fail, so it is last.

        Returns:
            False if an evaluation was left because a process was asked to stop.
        """
        if not self.something_is_due():
            return True
        if self._is_multiple(self.config.health.check_replicas_interval):
            self.trainer.activity.note(f"comparing replicas after iteration {self.progress.iteration}")
            self.replicas.check(self.progress.iteration)
        if self.saving.is_due(self.progress.iteration):
            self.saving.save_what_is_due(self.progress, keep_all=self._keeps_all())
        elif self._mirror_is_due() and self.mirror is not None:
            self.mirror.save(self.saving, self.progress)
        finished = not self._is_multiple(self._eval_interval()) or self.evaluate("valid")
        if finished and self._is_multiple(self.on_tasks.interval):
            finished = self.on_tasks.evaluate(self.progress)
        self.reporter.restart_clock()
        return finished

    def _eval_interval(self) -> int | None:
        return self.config.logging.eval_interval if self.loaders["valid"] is not None else None

    def _is_multiple(self, interval: int | None) -> bool:
        return interval is not None and self.progress.iteration % interval == 0

    def evaluate(self, split: str) -> bool:
        """Report the mean loss over ``--eval-iters`` global batches of a split, or over all of it.

        Which samples is a function of the iteration, so a resumed run evaluates on the same ones.

        Returns:
            False if it was left because a process was asked to stop.
        """
        loader, log = self.loaders[split], self.config.logging
        if loader is None or self.evaluated_at.get(split) == self.progress.iteration:
            return True
        whole = split == "valid" and log.full_validation
        by_token = whole or self.config.data.calculate_per_token_loss
        places = loader.whole(self.plan.full) if whole else self._evaluated_places(split)
        losses = []
        for number, place in enumerate(places):
            if self.is_to_stop():
                self.say(f" > left the evaluation on {split} data after {number} of {len(places)} batches")
                return False
            batches = loader.fetch(*place)
            losses.append(self.trainer.evaluate_sum(batches) if by_token else self.trainer.evaluate(batches))
        self.evaluated_at[split] = self.progress.iteration
        if by_token:
            total, count = torch.stack(losses).sum(0).tolist()
            loss = total / max(count, 1)
        else:
            loss = torch.stack(losses).mean().item()
        samples = self.progress.consumed_samples
        self.reporter.validation(
            ValidationRecord(
                self.progress.iteration,
                samples,
                samples * self.config.model.seq_length,
                loss,
                "validation" if split == "valid" else "test",
            )
        )
        return True

    def _evaluated_places(self, split: str) -> list[tuple[int, int]]:
        """(first sample, samples) of the global batches of this evaluation: the next ones each time."""
        interval, count, batch = self.config.logging.eval_interval, self.config.logging.eval_iters, self.plan.full
        assert interval
        turn = max(0, self.progress.iteration - 1) // interval if split == "valid" else 0
        turn = min(turn, self.plan.num_iterations() // interval)
        return [((turn * count + number) * batch, batch) for number in range(count)]

    def _keeps_all(self) -> bool:
        """Whether no checkpoint may go: while steps are skipped, an older one may have the last good weights."""
        if self.config.checkpoint.num_kept is None or not self.skipped_in_a_row:
            return False
        if not self.said_that_all_are_kept:
            self.say(
                "  no older checkpoint is deleted while steps are skipped (the gradient is not finite): "
                "the newest may hold broken weights"
            )
        self.said_that_all_are_kept = True
        return True
