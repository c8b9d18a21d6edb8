"""The loss scale of fp16: constant, or growing and shrinking by Megatron's rule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gptpar.config import PrecisionConfig
from gptpar.errors import GptparError


@dataclass
class LossScale:
    """A constant scale (``dynamic`` false), or Megatron's dynamic one.

    The first ``hysteresis - 1`` overflows leave the dynamic scale; each later one halves it. ``window`` good steps in a
    row double it and reset the count of overflows.

    Attributes:
        good_steps: in a row since the scale doubled, or since the last overflow.
        tolerance: overflows left until the scale halves; 0 or less: each overflow halves it.
    """

    value: float
    dynamic: bool
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    tolerance: int = 2

    def update(self, overflow: bool) -> None:
        """Adapt the scale to the result of a step.

        Raises:
            GptparError: the gradient overflowed although the scale is already at its minimum.
        """
        if not self.dynamic:
            return
        if not overflow:
            self.good_steps += 1
            if self.good_steps >= self.window:  # more, after a resume with a shorter window
                self.good_steps, self.tolerance, self.value = 0, self.hysteresis, self.value * 2
            return
        self.good_steps = 0
        self.tolerance -= 1
        if self.tolerance > 0:
            return
        if self.value <= self.minimum:
            raise GptparError(
                f"the loss scale is already at its minimum ({self.minimum:g}) and the gradient still overflows: the "
                "run has diverged, or the model does not fit fp16; lower --lr, lengthen the warm-up, or use --bf16."
            )
        self.value = max(self.value / 2, self.minimum)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's scale; minimum, window and hysteresis are this run's."""
        if self.dynamic and state["dynamic"]:
            self.value, self.good_steps = state["value"], state["good_steps"]
            self.tolerance = min(state["tolerance"], self.hysteresis)


def make_loss_scale(config: PrecisionConfig) -> LossScale:
    """1 without fp16, constant with ``--loss-scale``, else dynamic."""
    if not config.fp16:
        return LossScale(1.0, dynamic=False)
    if config.loss_scale is not None:
        return LossScale(config.loss_scale, dynamic=False)
    return LossScale(
        config.initial_loss_scale,
        dynamic=True,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        tolerance=config.hysteresis,
    )
