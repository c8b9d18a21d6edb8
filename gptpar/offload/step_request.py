"""The training loop's request for a step, while the device may still be computing the gradient norm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.offload.transfers import PendingScalar
from gptpar.optim.elementwise import clipped_divisor
from gptpar.optim.update import Hyperparameters


@dataclass(frozen=True)
class StepHyperparameters:
    """The numbers of one step's update.

    Attributes:
        groups: by parameter group.
        divisor: of the gradients: the loss scale times the clipping factor.
        missed: by how much the step's number is smaller for each group; empty: for none.
    """

    groups: tuple[Hyperparameters, ...]
    divisor: float
    missed: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepRequest:
    """A step that the training loop has asked for.

    Attributes:
        norm: of the whole gradient, without the loss scale.
        unclipped: the step's hyperparameters if nothing is clipped; ``None``: the step is skipped, whatever the norm.
        without: units that have no gradient and do not change.
    """

    norm: PendingScalar
    unclipped: StepHyperparameters | None
    without: frozenset[str]

    def clipped(self, clip_grad: float) -> StepHyperparameters | None:
        """The step's hyperparameters with clipping; waits for the norm. ``None``: skip the step, it is not finite.

        Args:
            clip_grad: the largest norm that is not clipped (0: any).
        """
        norm = self.norm.value()
        if self.unclipped is None or not norm < float("inf"):
            return None
        return replace(self.unclipped, divisor=clipped_divisor(norm, self.unclipped.divisor, clip_grad))
