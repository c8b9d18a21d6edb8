"""What the updating thread is told to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.offload.buckets import Recipe
from gptpar.offload.transfers import Later
from gptpar.optim.adam_update import clipped_divisor


@dataclass(frozen=True)
class Order:
    """An announced step, of which the device may still be computing the ``norm``.

    Attributes:
        unclipped: what it does if that norm is small enough; ``None``: nothing, whatever the norm.
        without: units that have no gradient and stay as they are.
    """

    norm: Later
    unclipped: Recipe | None
    without: frozenset[str]

    def decided(self, clip_grad: float) -> Recipe | None:
        """The step's recipe; ``None``: a gradient is not finite.

        Args:
            clip_grad: clipping by the global norm (0: never).
        """
        norm = self.norm.value()
        if self.unclipped is None or not norm < float("inf"):
            return None
        return replace(self.unclipped, divisor=clipped_divisor(norm, self.unclipped.divisor, clip_grad))
