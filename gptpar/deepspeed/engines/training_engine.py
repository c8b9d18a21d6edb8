"""The common base of all engines of ``gptpar.initialize``: steps, their numbers, schedules, whole tensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gptpar.adapter.engine_parts import EngineParts
from gptpar.adapter.guards.agreement import FINE, Agreement
from gptpar.adapter.guards.memory_watch import some_of
from gptpar.adapter.guards.not_copied import NotCopied
from gptpar.adapter.monitor import Monitor, Point, make_monitor
from gptpar.adapter.options import EngineOptions
from gptpar.checkpoint.save import print_report
from gptpar.checkpoint.saver import Saver
from gptpar.deepspeed.engines.batches import Batches, BatchSource
from gptpar.deepspeed.engines.checkpoint_verbs import CheckpointVerbs
from gptpar.deepspeed.engines.engine_state import StepGradient
from gptpar.deepspeed.engines.frozen_parameters import FrozenParameters
from gptpar.deepspeed.engines.getters import Getters
from gptpar.deepspeed.engines.moved_states import MovedStates
from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.deepspeed.engines.step_settings import StepSettings
from gptpar.deepspeed.engines.step_work import StepResult, Work
from gptpar.deepspeed.engines.whole_tensors import WholeTensors
from gptpar.engine.readings import Readings
from gptpar.engine.step_update import StepUpdate
from gptpar.errors import GptparError, UnusedParametersError
from gptpar.optim.skip_step import NOT_FINITE, make_skip_step

TIMEOUT_MINUTES = 30.0
"""The longest time that a process waits for the others, at the start and for a step's numbers."""

_UNTIL_CLOSED = ("engine", "host", "weights", "_work", "_step", "_saver", "_frozen")
"""Attributes that a closed engine no longer has."""


class TrainingEngine(NotCopied, Getters, StepSettings, WholeTensors, CheckpointVerbs, MovedStates):
    """Takes steps, whether the user or the engine runs their forward and backward passes.

    Between the backward pass and the step :meth:`full_gradient` has a parameter's gradient, under every ZeRO stage.

    Args:
        module: which is trained.
        work: runs its passes.
        parts: the engine's parts.
        groups: the parameter groups, whose hyperparameters are read at each step.
        options: the configuration.

    Attributes:
        module: the user's.
        data: the source of micro-batches for :meth:`train_batch`.
        optimizer: has the parameter groups.
        lr_scheduler: is stepped after each step; ``None``: there is none.
        options: as given, except for a batch size that :meth:`set_train_batch_size` has changed.
        loss_scaler: the present loss scale.
        global_steps: steps taken, skipped ones included.
        skipped_steps: steps that changed nothing because the gradient was not finite, as far as they are known.
        skip_step: skips steps whose loss or gradient norm is an outlier; ``None``: no step is skipped for that.
        micro_steps: micro-batches so far.
        global_samples: samples of all steps taken, on all processes.
    """

    def __init__(
        self,
        module: nn.Module,
        work: Work,
        parts: EngineParts,
        groups: list[dict[str, Any]],
        options: EngineOptions,
    ):
        super().__init__()
        self.module, self.options = module, options
        self.engine, self.host, self.weights, self.topology = parts.engine, parts.host, parts.weights, parts.topology
        self._work, self._activity, self._watch, self._failed = work, parts.activity, parts.watch, parts.failed
        self.loss_scaler = copy(options.loss_scale)
        self.skip_step = make_skip_step(*options.skip_step, self.device)
        readings = partial(Readings, timeout_s=60 * TIMEOUT_MINUTES, check=self._watch.check)
        self._step = StepUpdate(self.engine, self.skip_step, self._sum_over_all, readings)
        trained = {name: p for stage in self.engine.stages for name, p in stage.global_parameters().items()}
        updates, of_param = self.engine.optimizer.updates, self.weights.local_of(trained)
        self.optimizer = EngineOptimizer(
            updates,
            groups,
            self._update,
            self._drop_for_user,
            self.loss_scaler,
            of_param,
            lambda: self._skipped == NOT_FINITE,
            lambda: self.global_steps,
        )
        self.optimizer.offload_states, self.optimizer.reload_states = self.offload_states, self.reload_states
        self._frozen = FrozenParameters(self.optimizer, self.engine, trained)
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.data = BatchSource(options.batch.accumulation_steps, self.device)
        warn = print_report if self.topology.is_main else lambda sentence: None
        self._saver = Saver(self.topology, self.engine.optimizer.guard, warn)
        self._agreement = Agreement(self.topology, ordered=self.engine.gatherer.gathers_in_call_order)
        self._count = 0  # complete micro-batches of the current step
        self._has_begun = self._closed = self._in_train_batch = False
        self._gradient = StepGradient.GROWS
        self._readings: Readings | None = None
        self._monitor: Monitor | None = None
        if self.topology.is_main:
            scaled = options.dtype is torch.float16
            self._monitor = make_monitor(options.monitor, with_loss_scale=scaled, warn=warn, end=self._end_monitor)
        self._point = Point(0, 0, 0.0, 0.0)
        self._result: StepResult | None = None
        self._lr_kwargs: dict[str, Any] = {}
        self._mean_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._norm, self._skipped, self._verdict, self._ended_step = 0.0, 0.0, FINE, False

    # A step.

    def _prepare(self) -> None:
        """Prepare a step on the host, before its gradients are begun."""
        self._activity.note(f"step {self.global_steps + 1}")
        self.weights.catch_up()
        self._saver.poll()
        self._frozen.begin_step(self._read_last_step)
        self.engine.optimizer.expect_step(self._frozen.hyperparameters(), self._divisor)
        # Divided before the backward pass, so that hooks see what they see in plain torch; the mean over processes
        # follows the backward pass, as in DistributedDataParallel.
        self._work.scale.fill_(self.loss_scaler.value / self.options.batch.accumulation_steps)
        self._has_begun = True

    def _follow(self, passes: Sequence[Sequence[str]]) -> None:
        """Expect the next step to call the scopes of these passes."""

    def _update(self) -> None:
        if self._gradient is not StepGradient.FINAL:
            raise GptparError(
                f"{self._count} of {self.options.batch.accumulation_steps} micro-batches of the step are done: "
                "the optimizer can step after the last one's engine.backward(loss)."
            )
        self.weights.require_unchanged()
        self._frozen.require_unchanged()
        if not self.options.ignore_unused:
            self._require_all_used()
        self._activity.note(f"step {self.global_steps + 1}, optimizer")
        self._watch.note("the optimizer's step")
        result = self._result or self._result_of_calls()
        square = self.engine.gradients.reducer.square()
        self._mean_loss, self._readings = self._step.take(
            square,
            self._addend_of_mean(result.loss),
            self._frozen.hyperparameters(),
            self._divisor,
            self._agreement.evidence(result.passes, result.late, self._frozen.names, square).unbind(),
            self._judged,
        )
        self._follow(result.passes)
        self.global_steps += 1
        before, self.global_samples = self.global_samples, self.global_samples + self._samples_of_step()
        if self._monitor is not None:
            self._point = Point(before, self.global_samples, self.get_lr()[0], self.loss_scaler.value)
        self._ended_step = True
        self._watch.begin_step(self.global_steps + 1)
        self._forget_step()
        if self.loss_scaler.dynamic or self.device.type == "cpu":
            self._take_note_of_last_step()
        if self.lr_scheduler is not None and not (self.loss_scaler.dynamic and self._skipped == NOT_FINITE):
            self.lr_scheduler.step(**self._lr_kwargs)

    def _judged(self, norm: torch.Tensor, sums: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        norm, verdict = self._agreement.judge(norm, sums)
        return norm, [verdict]

    def _require_all_used(self) -> None:
        collector = self.engine.gradients
        unused = sorted(self._frozen.trained - collector.arrived)
        count = torch.tensor(float(len(unused)), device=self.device)
        if self._sum_over_all(count) > 0:
            raise UnusedParametersError(
                f"{len(unused)} parameters had no gradient in this step on this process ({some_of(unused)}), "
                f"{int(count)} on all together, and zero_optimization.ignore_unused_parameters is false: nothing was "
                "updated."
            )

    def _result_of_calls(self) -> StepResult:
        """The result of passes that the user has called."""
        return self._work.result()

    def _sum_over_all(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.topology.mesh.world_size > 1:
            self._watch.wait_for(dist.all_reduce(tensor, async_op=True))
        return tensor

    def _samples_of_step(self) -> int:
        """Samples of the step that ends, on all processes."""
        return self.options.batch.train_batch_size

    def _addend_of_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """This process's addend of the mean over processes; its loss is zero if another stage has the loss."""
        return loss.double() / self.topology.mesh.data

    # Whole batches.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take a step over ``gradient_accumulation_steps`` micro-batches, in the module's present mode.

        Their tensors are copied to the device. The engine's class says how they are passed to the module, and what its
        loss is.

        Args:
            data_iter: has this process's micro-batches; default: the ``training_data`` of :func:`gptpar.initialize`.

        Returns:
            [] the mean loss over micro-batches and processes, on the device, fp32 or wider, without waiting for it.

        Raises:
            StopIteration: the data is at its end; nothing was done.
            GptparError: the data ends within the step, there is no loss, or another step has begun.
        """
        self._require_usable()
        self._require_optimizer()
        self._require_no_step()
        batches = self.data.take(data_iter)
        self._watch.note("engine.train_batch()")
        try:
            self._prepare()
            self._result = result = self._try_passes(batches)
            self._take_note_of_last_step()
            self._count, self._gradient = len(batches), StepGradient.FINAL
            self.micro_steps += len(batches)
            self.optimizer.step()
        finally:
            self._forget_step()
        return self._mean_loss.to(result.loss.dtype)

    def _try_passes(self, batches: Batches) -> StepResult:
        self._in_train_batch = True
        try:
            return self._passes(batches)
        except BaseException:
            self._note_failure("train_batch", exchanging=self.topology.mesh.pipeline > 1)
            self._drop_step()  # some of its gradients are incomplete
            raise
        finally:
            self._in_train_batch = False

    def _note_failure(self, what: str, *, exchanging: bool = False) -> None:
        """A pass ends in an error, maybe on this process alone; ``exchanging``: others may wait for it for certain."""
        gathers = self.engine.gatherer.gathers_in_call_order
        if exchanging or gathers or self.engine.gradients.reducer.has_begun:
            self._failed.note(f"{what} of step {self.global_steps + 1}, micro-batch {self._count + 1}")

    def _require_optimizer(self) -> None:
        if not self.options.has_optimizer:
            raise GptparError(
                "this engine has no optimizer, and takes no steps: pass optimizer= to initialize, or add "
                '{"optimizer": {"type": "AdamW"}} to the configuration.'
            )

    def _passes(self, batches: Batches) -> StepResult:
        """All forward and backward passes of a step."""
        return self._work(batches)

    def _take_note_of_last_step(self) -> None:
        """Read the numbers of the last step, which has probably ended by now.

        Raises:
            GptparError: the step was refused, on all processes.
        """
        self._read_last_step()
        verdict, self._verdict = self._verdict, FINE
        if verdict:
            raise self._agreement.error(verdict, self.global_steps)

    def _read_last_step(self, monitor: Monitor | None = None) -> None:
        """The same without raising; the error is kept until all processes can raise it together."""
        readings, self._readings = self._readings, None
        if readings is None:
            return
        loss, self._norm, self._skipped, self._verdict = readings.read()
        if self._verdict:
            return
        if (monitor := monitor or self._monitor) is not None:
            monitor.write(replace(self._point, lm_loss=loss))
        if not self._skipped:
            self._frozen.count_step()
        self.skipped_steps += self._skipped == NOT_FINITE
        self.loss_scaler.update(self._skipped == NOT_FINITE)
        every = self.options.steps_per_print
        if every and self.global_steps % every == 0 and self.topology.is_main:
            told = f"gradient norm {self._norm:.4g}, {self.skipped_steps} skipped so far"
            rates = ", ".join(f"{rate:.4g}" for rate in self.get_lr())
            print(f"step {self.global_steps}: learning rate {rates}, {told}", flush=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step, which begins again with its first micro-batch."""
        self._drop_for_user()

    def _drop_for_user(self) -> None:
        """Drop the step; methods that the user calls call this one directly."""
        self._drop_step()

    def _drop_step(self) -> None:
        if self._has_begun and self.host is not None:
            self.host.cancel()  # it may have speculated with the first gradients
        self._forget_step()

    def _forget_step(self) -> None:
        self._count, self._has_begun, self._gradient, self._result = 0, False, StepGradient.GROWS, None

    # The end.

    def close(self) -> None:
        """End the engine and return the module with whole weights and without hooks; all processes call it.

        A save under way is finished first. The engine's memory is free afterwards, and the module can be passed to
        another ``gptpar.initialize``. close() may be called within a step. While an exception is handled, weights are
        not gathered from other processes.

        Raises:
            CheckpointError: the last save behind the training failed.
        """
        if self._closed:
            return
        self._end_monitor()
        alone = not self.engine.gatherer.gathers_in_call_order
        others_come = sys.exc_info()[0] is None and self._watch.error is None
        try:
            self._finish_save(alone=not others_come)
        finally:
            self._give_back(whole=alone or others_come)

    def _give_back(self, *, whole: bool) -> None:
        """The module gets its weights back, if they are to be whole, and the engine ends."""
        try:
            if whole:
                self._drop_step()
                self.engine.finish()
                self.engine.gatherer.release_all()
                self.engine.release()
                self.weights.give_back()
        finally:
            self._closed = True
            self._watch.close()
            self.engine.close()
            self.weights.undo()
            for name in _UNTIL_CLOSED:
                delattr(self, name)
            gc.collect()  # hooks and engine refer to each other

    def _end_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.finish(self._readings, lambda: self._read_last_step(monitor))

    def __getattr__(self, name: str) -> Any:
        if name in _UNTIL_CLOSED:
            self._require_open()
        return super().__getattr__(name)

    def destroy(self) -> None:
        """The same as :meth:`close`, by DeepSpeed's name."""
        self.close()

    def _require_usable(self) -> None:
        """Raise if the engine is closed, or if a pass has failed on some processes alone."""
        self._require_open()
        self._failed.settle()

    def _require_open(self) -> None:
        if self.__dict__.get("_closed"):
            raise GptparError("the engine is closed: give its module, which has the weights, to another initialize.")
