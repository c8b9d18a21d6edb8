"""Lets processes agree at the end of a step to stop or to save: their requests are one number in a sum. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_EACH = 1 << 16
"""More than the processes of a run; three counts fit into a float64 exactly."""

MAX_TARGETS = 2


@dataclass(frozen=True)
class Votes:
    """The requests of all processes.

    Attributes:
        stop: whether any process asked to end the run.
        saves: whether any process asked for a save, for each of ``MAX_TARGETS`` targets.
    """

    stop: bool
    saves: tuple[bool, ...]

    @staticmethod
    def number(stop: bool, saves: Sequence[bool] = ()) -> float:
        """One process's votes, to be summed."""
        return float(sum(_EACH**place for place, vote in enumerate((stop, *saves)) if vote))

    @classmethod
    def of(cls, total: float) -> Self:
        """Read the votes from their sum over all processes."""
        counts = [int(total) // _EACH**place % _EACH for place in range(1 + MAX_TARGETS)]
        return cls(counts[0] > 0, tuple(count > 0 for count in counts[1:]))
