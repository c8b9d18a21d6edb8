"""The training loop's request for a step, maybe before the norm is known, and the numbers of its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptpar.offload.transfers import PendingScalar
from gptpar.optim.elementwise import HostKernel, clipped_divisor
from gptpar.optim.update import Hyperparameters


@dataclass(frozen=True)
class StepHyperparameters:
    """The numbers of one step's update.

    Attributes:
        groups: by parameter group.
        divisor: of the gradients: the loss scale times the clip divisor.
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
        expected: the hyperparameters that were announced before the request; ``None``: none were.
    """

    norm: PendingScalar
    unclipped: StepHyperparameters | None
    without: frozenset[str]
    expected: StepHyperparameters | None = None

    def clipped(self, clip_grad: float) -> StepHyperparameters | None:
        """The step's hyperparameters with clipping; waits for the norm. ``None``: skip the step, it is not finite.

        Args:
            clip_grad: the largest norm that is not clipped (0: any).
        """
        norm = self.norm.value()
        if self.unclipped is None or not norm < float("inf"):
            return None
        return replace(self.unclipped, divisor=clipped_divisor(norm, self.unclipped.divisor, clip_grad))


class KernelNumbers:
    """The kernels' arguments for each group, kept from the last call: most buckets of a step have the same ones.

    Args:
        kernels: by group.
    """

    def __init__(self, kernels: Sequence[HostKernel]):
        self._kernels = kernels
        self._found: Sequence[Any] = ()
        self._are_of: tuple[StepHyperparameters | None, int] = (None, 0)

    def of(self, hyperparameters: StepHyperparameters, step: int) -> Sequence[Any]:
        """By group.

        Args:
            step: number of the step, from 1.
        """
        if self._are_of != (hyperparameters, step):
            self._are_of = (hyperparameters, step)
            divisor, groups = hyperparameters.divisor, hyperparameters.groups
            numbers = [step - missed for missed in hyperparameters.missed or [0] * len(groups)]
            of_groups = zip(self._kernels, groups, numbers, strict=True)
            self._found = [kernel.step_of(how, number, divisor) for kernel, how, number in of_groups]
        return self._found
