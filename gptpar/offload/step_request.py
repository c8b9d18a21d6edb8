"""What the training loop asks of the updating thread: a step, whose norm the device may still be computing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.offload.transfers import PendingScalar
from gptpar.optim.elementwise import Hyperparameters, clipped_divisor


@dataclass(frozen=True)
class StepHyperparameters:
    """What one step does to each element.

    Attributes:
        groups: by parameter group.
        divisor: what gradients are divided by: the loss scale times clipping.
    """

    groups: tuple[Hyperparameters, ...]
    divisor: float


@dataclass(frozen=True)
class StepRequest:
    """A step that the training loop has asked for.

    Attributes:
        norm: of the whole gradient, without the loss scale.
        unclipped: what the step does if the norm is small enough; ``None``: nothing, whatever the norm.
        without: units that have no gradient and stay as they are.
    """

    norm: PendingScalar
    unclipped: StepHyperparameters | None
    without: frozenset[str]

    def clipped(self, clip_grad: float) -> StepHyperparameters | None:
        """What the step does, once the norm is known; ``None``: nothing, because a gradient is not finite.

        Args:
            clip_grad: the largest norm that is not clipped (0: any).
        """
        norm = self.norm.value()
        if self.unclipped is None or not norm < float("inf"):
            return None
        return replace(self.unclipped, divisor=clipped_divisor(norm, self.unclipped.divisor, clip_grad))
