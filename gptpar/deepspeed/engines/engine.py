"""The engine that a training script holds: DeepSpeed's verbs over any module."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from gptpar.adapter.engine_parts import EngineParts
from gptpar.adapter.module_stage import ROOT, ModuleStage
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.parameter_gradients import ParameterGradients
from gptpar.adapter.plain_backward import PlainBackward
from gptpar.adapter.tied_weight import TiedWeight
from gptpar.deepspeed.engines.batches import Batches, LossFunction, cast_inputs, evaluating, require_loss
from gptpar.deepspeed.engines.engine_state import StepGradient
from gptpar.deepspeed.engines.graph import RecordedWork, wants_graph
from gptpar.deepspeed.engines.step_ends import StepEnds
from gptpar.deepspeed.engines.step_work import StepResult, StepWork
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.engine.backward_passes import BACKWARD_PASSES
from gptpar.errors import GptparError, UsageError

_SPENT = "gptpar: its graph is gone"


class ModuleEngine(StepEnds, TrainingEngine):
    """Trains a module: ``loss = engine(x)``, ``engine.backward(loss)``, ``engine.step()`` for each micro-batch.

    In :meth:`train_batch` and :meth:`eval_batch`, a micro-batch that is a mapping is passed to the module as keywords,
    a tuple or a list as positional arguments, anything else as one argument. The loss is what ``loss_fn(output,
    micro-batch)`` returns; without it the output, its ``loss``, or the first element of a tuple.

    Args:
        stage: the module, on the engine.
        loss_fn: finds the loss in the module's output, for :meth:`train_batch` and :meth:`eval_batch`.

    The other arguments are those of :class:`~gptpar.deepspeed.engines.training_engine.TrainingEngine`.
    """

    _work: StepWork

    def __init__(
        self,
        stage: ModuleStage,
        parts: EngineParts,
        groups: list[dict[str, Any]],
        options: EngineOptions,
        loss_fn: LossFunction | None = None,
    ):
        tied_weight = TiedWeight.of(stage, parts.engine, parts.host)
        work = StepWork(stage, parts.engine, self.forward, loss_fn, parts.activity, tied_weight)
        super().__init__(stage.module, work, parts, groups, options)
        self._stage = stage
        self._recorded: RecordedWork | None = None
        if wants_graph(options, self.world_size, self.device):
            self._recorded = RecordedWork(self.module, work, self.engine)
        self._plain = PlainBackward(self._take_plain, self._end_plain)
        stage.comes_back, self.engine.gradients.begin_unannounced = self._comes_back, self._plain.begin
        self._grads: ParameterGradients | None = None
        if options.zero_stage == 0 and parts.host is None:
            trained, sums = stage.global_parameters(), options.sums_gradients
            self._grads = ParameterGradients(self.engine, trained, self.dp_world_size, sums=sums)
        self._are_means = self._is_scaled = self._ends_step = False
        self._knows_late_units = False
        self._num_passes = 0  # backward passes of the step that the user has called
        self._drops = 0  # steps in a row that zero_grad() has dropped
        self._needs_losses = options.monitor.draws_curves or self.skip_step is not None
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating-point inputs are cast if the configuration has ``auto_cast``."""
        self._require_usable()
        args, kwargs = cast_inputs((args, kwargs), self.options.input_dtype)
        try:
            with self._stage.forward(), self._activity.lost_ranks_explained():
                return self.module(*args, **kwargs)
        except BaseException:
            if self.engine.gatherer.gathers_in_call_order:
                self._note_failure("a forward pass")
            raise

    # A step.

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True, create_graph: bool = False
    ) -> torch.Tensor:
        """Add the gradient of a micro-batch's loss to the step's.

        The step's gradient is the mean over its micro-batches and the data-parallel processes; several calls in one
        micro-batch add up. The loss is multiplied by the loss scale and divided by ``gradient_accumulation_steps``
        before the backward pass, so hooks and ``Function.backward`` see that. The mean over processes is formed
        afterwards.

        Args:
            loss: a scalar computed from the output of :meth:`forward`.
            retain_graph: whether autograd keeps the graph for another backward pass.
            scale_wrt_gas: whether this loss is one of ``gradient_accumulation_steps`` that are averaged; else it counts
                in full.
            create_graph: refused, because gradients are taken out of autograd as soon as they are formed.

        Returns:
            The loss, divided by ``gradient_accumulation_steps`` if ``scale_wrt_gas``.

        Raises:
            GptparError: the loss is no scalar with a gradient, or ``create_graph`` is asked for.
        """
        self._require_loss(loss)
        if create_graph:
            raise GptparError(
                "engine.backward(create_graph=True): gradients are taken out of autograd as they come, so that no "
                "graph of them can be kept. Gradients with respect to inputs (torch.autograd.grad) can have one."
            )
        self._begin_pass()
        last = self._is_last()
        divisor = self.options.batch.accumulation_steps if scale_wrt_gas else 1
        incoming = None if scale_wrt_gas else self.loss_scaler.value
        try:
            self._work.backward(loss, last=last, incoming=incoming, retain_graph=retain_graph)
        except BaseException:
            self._note_failure("a backward pass")
            self._drop_step()  # some of its gradients are incomplete: it has to begin again
            raise
        if self._needs_losses:
            self._loss += loss.detach().double() / divisor
        self._end_pass(last)
        if not retain_graph:
            _notes_of(loss)[_SPENT] = True
        return loss if divisor == 1 else loss.detach() / divisor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, whose ``backward()`` may be called without the engine."""
        self._require_loss(loss)
        self._take_note_of_last_step()
        self._is_scaled = True
        return loss * self.loss_scaler.value

    def _begin_pass(self) -> None:
        if self._grads is not None:
            self._grads.hide()
        self._num_passes += 1
        if not self._has_begun:
            self._begin()
            return
        before = self._gradient
        if before is not StepGradient.GROWS:
            self._reopen()
        elif not self.options.managed:
            self.weights.guard.reopen()
        if before is not StepGradient.FINAL:
            self.weights.catch_up()

    def _reopen(self) -> None:
        """The step has another backward pass, though its gradient has been summed over processes."""
        self.engine.gatherer.keep_last_step()  # the CPU may have worked ahead with that gradient
        final = self.engine.copy_of_gradient(self.dp_world_size if self._are_means else 1)
        self._add_gradients()
        self.engine.gradients.reopen(final)
        self.weights.guard.reopen()
        self._gradient, self._are_means = StepGradient.GROWS, False

    def _sum_gradient(self) -> None:
        if self._gradient is not StepGradient.GROWS:
            return
        if self._grads is not None:
            self._grads.hide()
        self._work.sum_gradient()
        self.engine.gatherer.keep_last_step()
        self.weights.guard.reopen()
        self._gradient = StepGradient.READ
        self._show(summed=True)

    def _show(self, *, summed: bool) -> None:
        if self._grads is not None:
            self._are_means = self._grads.show(final=summed)

    def _end_pass(self, last: bool) -> None:
        self._gradient = StepGradient.FINAL if last else StepGradient.GROWS
        self._show(summed=last)
        if last or not self.options.managed:
            self._guard_until_step()

    def _guard_until_step(self) -> None:
        if self._grads is None or not self._grads.are_shown:
            self.weights.guard.until_step()

    def _forget_step(self) -> None:
        self.weights.guard.step_ended()
        super()._forget_step()
        self._num_passes = 0

    # A backward pass that the user begins.

    def _comes_back(self) -> None:
        """A gradient has reached an output of the module, in some backward pass."""
        if self._grads is not None and self._grads.are_shown:
            self._grads.hide()
            BACKWARD_PASSES.at_end(self._grads.show_again)  # it may be another engine's
        if not BACKWARD_PASSES.belongs_to_engine:
            self._plain.comes_back()

    def _take_plain(self) -> contextlib.AbstractContextManager[None]:
        problem = None
        if self._needs_losses:
            problem = "does not tell the engine the loss, which monitors and skip_step_sigma need: call"
        elif self.options.dtype == torch.float16 and not self._is_scaled:
            problem = "of a loss without the loss scale, which fp16 needs: call engine.scale(loss).backward() or"
        elif self._grads is not None and self._grads.are_shown:
            problem = "of a loss that does not depend on the model's outputs, after another backward pass: call"
        if problem is not None:
            raise GptparError(f"loss.backward() {problem} engine.backward(loss).")
        self._begin_pass()
        self._ends_step = self._is_last()
        return self._work.backward_pass(last=self._ends_step, unannounced=1 / self.options.batch.accumulation_steps)

    def _end_plain(self, had_begun: bool) -> None:
        if had_begun:
            self._is_scaled = False
            self._end_pass(self._ends_step)
        elif self._grads is not None:
            self._grads.show_again()

    def _require_usable(self) -> None:
        if self._plain.abandon():
            self._note_failure("a backward pass")
            self._drop_step()
        super()._require_usable()

    # The step's end.

    @property
    def _divisor(self) -> float:
        return self.loss_scaler.value if self._are_means else super()._divisor

    def _result_of_calls(self) -> StepResult:
        if self._grads is not None:
            self._grads.hide()
        return replace(super()._result_of_calls(), loss=self._loss)

    def _begin(self) -> None:
        self._take_note_of_last_step()
        self._prepare()
        self._loss.zero_()
        self._are_means = False
        counted = self.options.managed and not self._no_sync and self._boundary is None
        passes = self.options.batch.accumulation_steps if counted else 2 - self._is_last()
        if passes > 1:
            self._add_gradients()
        self._work.begin(passes)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; after the step's last one, update the parameters.

        Args:
            lr_kwargs: keyword arguments of the schedule's ``step()``.

        Raises:
            GptparError: no gradient of the micro-batch is final, though it is the step's last; or this is inside of
                :meth:`no_sync`, where no micro-batch ends, as in DeepSpeed.
        """
        self._require_usable()
        self._require_optimizer()
        if self._no_sync:
            raise UsageError("engine.step() was called inside no_sync(), where no step ends: call it after that.")
        if not self.options.managed:
            self._end_gradient()
        is_final = self._gradient is StepGradient.FINAL
        ends_step = is_final or self._is_last() or not self.options.managed
        if ends_step and not is_final:
            raise GptparError(
                "engine.step() at the end of a step whose last micro-batch had no engine.backward(loss), or had it in "
                "no_sync() alone: nothing was changed."
            )
        self._count += 1
        self.micro_steps += 1
        self._stage.end_micro_batch()
        self._ended_step = False
        if ends_step:
            self._lr_kwargs = dict(lr_kwargs or {})
            self.optimizer.step()
            self._drops = 0

    def _samples_of_step(self) -> int:
        if self.options.managed:
            return super()._samples_of_step()
        passes = self._num_passes or self._count  # train_batch has counted its micro-batches
        return self.options.batch.train_batch_size // self.options.batch.accumulation_steps * passes

    def _drop_for_user(self) -> None:
        if self._count:
            self._drops += 1
            if self._drops == 2:  # once may be meant, of a micro-batch that the user rejects
                warnings.warn(
                    f"zero_grad() dropped a step after {self._count} of its {self.options.batch.accumulation_steps} "
                    "micro-batches, as it did with the step before. If it is called at every micro-batch, no step is "
                    "ever taken: leave it out, the engine drops gradients after each step.",
                    stacklevel=3,
                )
        super()._drop_for_user()

    def _drop_step(self) -> None:
        if self._grads is not None:
            self._grads.hide()
        if self._has_begun:
            self._stage.end_micro_batch()  # a pass of the step was observed, and the last one may never come
        super()._drop_step()

    def _require_no_step(self) -> None:
        if self._has_begun or self._count or self._no_sync:
            raise GptparError(
                f"train_batch() or set_train_batch_size() within a step, {self._count} of whose micro-batches are "
                "done, or in no_sync(): end the step with engine.step(), or drop it with engine.zero_grad()."
            )

    def _passes(self, batches: Batches) -> StepResult:
        return (self._recorded or self._work)(batches)

    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The mean loss of as many micro-batches as a step has, in eval mode and without gradients.

        Micro-batches and losses are as in :meth:`train_batch`. Afterwards each module has its former mode. A current
        step is not changed.

        Returns:
            [] the mean over micro-batches and processes, on the device, fp32 or wider; the host does not wait for it.

        Raises:
            StopIteration: the data is at its end.
            GptparError: the data ends within the batch, or there is no loss.
        """
        self._require_usable()
        batches = self.data.take(data_iter)
        with self._watch.together("eval_batch"), evaluating(self):
            mean = self._work.evaluate(batches)
        return self.topology.sum_over_all(self._addend_of_mean(mean)).to(mean.dtype)

    def close(self) -> None:
        """See :meth:`TrainingEngine.close <gptpar.deepspeed.engines.training_engine.TrainingEngine.close>`."""
        if self._recorded is not None:
            self._recorded.release()
            self._recorded = None
        if self._grads is not None:
            self._grads.hide()
            self._grads = None
        super().close()
        self.__dict__.pop("_stage", None)

    def _let_go_of_recording(self) -> None:
        if self._recorded is not None:
            self._recorded.release()

    def _follow(self, passes: Sequence[Sequence[str]]) -> None:
        if passes:
            self.engine.gatherer.follow([passes[-1]], stays=(ROOT,))
        if not self._knows_late_units:
            self._agree_on_late_units()

    def _agree_on_late_units(self) -> None:
        """After the first step, whose passes were observed: later ones hand units on in an order that all share."""
        self._knows_late_units = True
        if self.world_size > 1 and self._stage.may_observe:
            collector = self.engine.gradients
            late = torch.tensor(collector.late_units, dtype=torch.float64, device=self.device)
            collector.hand_on_last([bool(count) for count in self._sum_over_all(late).tolist()])

    def _add_gradients(self) -> None:
        if self._recorded is not None and not self.engine.can_add_gradients:
            self._recorded.release()  # it refers to the sums' present memory
        super()._add_gradients()

    def _require_loss(self, loss: torch.Tensor) -> None:
        self._require_usable()
        self._require_optimizer()
        require_loss(loss)
        if _SPENT in _notes_of(loss):
            raise GptparError(
                "engine.backward(loss) twice for one loss, whose graph is gone since the first time: call the model "
                "again, or pass retain_graph=True the first time if the loss is to count twice."
            )


def _notes_of(loss: torch.Tensor) -> dict[str, Any]:
    """Metadata that autograd keeps with the graph of a loss."""
    return {} if loss.grad_fn is None else cast(Any, loss.grad_fn).metadata
