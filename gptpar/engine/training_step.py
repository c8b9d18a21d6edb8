"""Runs a training step of a GPT or of any module: passes of a pipeline, update, numbers for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptpar.engine.engine import Engine
from gptpar.engine.readings import Readings
from gptpar.optim.skip_step import SkipStep, step_unless_outlier
from gptpar.optim.update import Hyperparameters
from gptpar.pipeline.runtime import MicroBatch, Observer, Pipeline

Numbers = Sequence[torch.Tensor]
"""Scalars on the device."""
Sum = Callable[[torch.Tensor], torch.Tensor]
MakeReadings = Callable[[Numbers], Readings]
Judge = Callable[[torch.Tensor, Numbers], tuple[torch.Tensor, Numbers]]


class PipelinePasses(Observer):
    """Runs the passes of a step by the pipeline's schedule, and reports each pass to the engine.

    Args:
        engine: has the layers' parameters.
        pipeline: the layers.
        note: called with a phrase for what this process begins to do.

    Attributes:
        step: begins each note, such as ``iteration 12, ``.
        scale: the incoming gradient of each micro-batch's loss, on the device, so that a recorded step reads its
            present value. fp16 may be too narrow for it.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline, note: Callable[[str], None]):
        self.engine, self.pipeline, self._note, self.step = engine, pipeline, note, ""
        self.scale = torch.ones((), dtype=engine.settings.wide, device=engine.device)
        self._last = 0

    def run(self, inputs: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Accumulate the gradient of the step that :meth:`Engine.begin_gradients` has begun; it is final afterwards.

        Returns:
            The micro-batches' losses, if this process has the last layer; else nothing.
        """
        self._last = len(inputs) - 1
        losses = self.pipeline.forward_backward(inputs, grad=self.scale, observer=self)
        self._note(f"{self.step}gradient reduction")
        self.engine.gradients.reducer.finish()
        return losses

    def before_forward(self, micro_batch: int, virtual_stage: int) -> None:
        self._note(f"{self.step}micro-batch {micro_batch + 1}, forward")
        self.engine.gradients.in_last_forward = micro_batch == self._last

    def before_backward(self, micro_batch: int, virtual_stage: int, output: torch.Tensor) -> None:
        self._note(f"{self.step}micro-batch {micro_batch + 1}, backward")
        self.engine.gradients.begin_backward(virtual_stage, last=micro_batch == self._last)

    def after_backward(self, micro_batch: int, virtual_stage: int) -> None:
        self.engine.gradients.end_backward()


class StepUpdate:
    """Takes optimizer steps: gradient norm, clipping, rule for outliers, update, and numbers that are read later.

    Args:
        engine: has the gradients.
        skip_step: the rule for outliers; ``None``: no step is one.
        sum_over_all: sums a tensor over all processes, in place.
        readings: has the device copy numbers to the host.

    Attributes:
        skipped: [] of the step taken last, on the device; see :func:`~gptpar.optim.skip_step.step_unless_outlier`.
    """

    skipped: torch.Tensor

    def __init__(self, engine: Engine, skip_step: SkipStep | None, sum_over_all: Sum, readings: MakeReadings):
        self._engine, self._skip_step = engine, skip_step
        self._sum_over_all, self._readings = sum_over_all, readings

    def take(
        self,
        square: torch.Tensor,
        loss: torch.Tensor,
        hyperparameters: tuple[Hyperparameters, ...],
        divisor: float,
        others: Numbers = (),
        judge: Judge = lambda norm, others: (norm, others),
    ) -> tuple[torch.Tensor, Readings]:
        """Launch the update; nothing waits for the device.

        Args:
            square: [] fp64 this process's part of the gradient's sum of squares.
            loss: [] fp64 this process's addend to the mean loss, zero if it has none.
            hyperparameters: by parameter group.
            divisor: of the gradient, such as the loss scale.
            others: [] fp64 each; they are summed over all processes in the same message.
            judge: from the gradient's norm and the sums of ``others`` to (the norm, or infinity if the step must not be
                taken; numbers to be read).

        Returns:
            [] the mean loss, on the device; readings of (mean loss, gradient norm, skipped, judge's numbers).
        """
        square, mean_loss, *summed = self._sum_over_all(torch.stack([square, loss, *others]))
        norm = square.sqrt() / torch.full_like(square, divisor)  # a number would be inverted and multiplied on GPUs
        norm, numbers = judge(norm, summed)
        self.skipped = step_unless_outlier(
            self._skip_step, mean_loss, norm, lambda judged: self._engine.step(judged, hyperparameters, divisor)
        )
        return mean_loss, self._readings([mean_loss, norm, self.skipped, *numbers])
