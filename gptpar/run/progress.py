"""``Progress``: a run's counters (steps, samples, tokens), which a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        iteration: steps begun, skipped ones included.
        consumed_samples: samples read, those of skipped steps included; this is the position in the data.
        scheduled_samples: the position in the schedules: samples of all steps but those whose gradient was not finite.
        skipped_iterations: steps whose gradient was not finite.
        nan_iterations: steps whose loss was not finite.
        fitted_iters: steps in the whole run as ``--train-minutes`` has fixed them, once it has.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    fitted_iters: int | None = None
