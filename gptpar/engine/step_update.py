"""Takes a step of a GPT or of any module: gradient norm, clipping, outliers, update, numbers for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptpar.engine.engine import Engine
from gptpar.engine.readings import Readings
from gptpar.optim.skip_step import SkipStep, step_unless_outlier
from gptpar.optim.update import Hyperparameters

Numbers = Sequence[torch.Tensor]
"""Scalars on the device."""
Sum = Callable[[torch.Tensor], torch.Tensor]
MakeReadings = Callable[[Numbers], Readings]
Judge = Callable[[torch.Tensor, Numbers], tuple[torch.Tensor, Numbers]]


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
