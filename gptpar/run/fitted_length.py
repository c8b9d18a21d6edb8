"""``--train-minutes``: decides how many steps fit, from the time that the steps so far really took."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from gptpar.config import BatchConfig
from gptpar.config.sections.batch import MEASURED_STEPS
from gptpar.run.progress import Progress


@dataclass
class FittedLength:
    """Times a process's steps, and says how many the run has: after the first ten, then after each tenth of the rest.

    Later decisions keep the promised time where other programs come or go meanwhile.

    Args:
        minutes: ``--train-minutes``, counted from the first step of this process.
        most: ``--train-iters``.
        needed: ``--train-iters-needed``.
        now: seconds on a clock that never jumps.
    """

    minutes: float
    most: int
    needed: int | None = None
    now: Callable[[], float] = time.monotonic
    _times: list[float] = field(default_factory=list)
    _due: int = MEASURED_STEPS

    def __post_init__(self) -> None:
        self._times.append(self.now())

    @staticmethod
    def of(batch: BatchConfig, done: Progress) -> FittedLength | None:
        """The timer of a run; ``None`` where nothing is to be decided: no flag, or the length is known already."""
        if batch.train_minutes is None or batch.train_iters is None or done.fitted_iters is not None:
            return None
        return FittedLength(batch.train_minutes, batch.train_iters, batch.train_iters_needed)

    def is_due(self) -> bool:
        """Called after each step; whether this was the last one before a decision."""
        self._times.append(self.now())
        return len(self._times) - 1 == self._due

    def seconds_left(self) -> float:
        """Seconds until the minutes are over."""
        return max(0.0, 60 * self.minutes - (self.now() - self._times[0]))

    def measured(self) -> tuple[float, float]:
        """(seconds a step takes, seconds that are left)."""
        last = self._times[1:][-MEASURED_STEPS - 1 :]
        steps = sorted(later - earlier for earlier, later in pairwise(last))
        # Without the longest: it may hold an evaluation or a save, which is no step.
        return statistics.fmean(steps[:-1]), 60 * self.minutes - (self._times[-1] - self._times[0])

    def decide(self, done: int, seconds_a_step: float, seconds_left: float) -> tuple[int, str]:
        """The number of steps of the whole run, and a sentence with the numbers that it rests on.

        Args:
            done: steps taken so far.
        """
        fit = done + max(0, int(seconds_left / seconds_a_step))
        steps = min(self.most, fit)
        self._due += max(1, (steps - done) // 10)
        sentence = f"a step takes {seconds_a_step:.2f} s: {fit:,} steps fit into {self.minutes:.1f} minutes of training"
        if fit > self.most:
            sentence += f", and --train-iters {self.most:,} are wanted"
        if self.needed is not None and steps < self.needed <= self.most:
            minutes = math.ceil(self.needed * seconds_a_step / 60 + 0.5)
            sentence += (
                f". About {self.needed:,} are needed to learn more than the frequencies of the tokens (to get below "
                f"their unigram entropy): begin anew with --train-minutes {minutes} (in the example: MINUTES={minutes} "
                "and another RUN), or on a faster or less busy machine"
            )
        return steps, sentence
