"""What the updating thread is told to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.optim.buckets import Recipe
from gptpar.optim.transfers import Later


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
        """The step's recipe, with the same arithmetic as on the device; ``None``: a gradient is not finite.

        Args:
            clip_grad: clipping by the global norm (0: never).
        """
        norm = self.norm.value()
        if self.unclipped is None or not norm < float("inf"):
            return None
        clipping = max(1.0, (norm + 1e-6) / clip_grad) if clip_grad > 0 else 1.0
        return replace(self.unclipped, divisor=self.unclipped.divisor * clipping)
