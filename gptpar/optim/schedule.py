"""Megatron's schedules of learning rate (cosine, linear, WSD, ...) and weight decay, as pure functions of progress.

Progress is measured in samples, or in tokens if any of the token flags is given. The step that starts at progress n
uses ``learning_rate(n)``: with a warm-up the first step uses the initial rate, as in Megatron. The ``scheduler`` of a
DeepSpeed configuration takes the place of all this; it counts steps, which follow from the samples and the batch sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gptpar.config import Config
from gptpar.config.batch_sizes import BatchSizes, schedule_lengths
from gptpar.optim.step_schedules import FORMULAS, one_cycle_betas


@dataclass(frozen=True)
class Schedule:
    """The learning rate and the weight decay at each point of a run.

    Attributes:
        in_tokens: whether lengths are tokens; else they are samples.
        warmup, decay, wsd_tail: lengths of the learning rate's phases.
        total: length of the run; the weight decay grows over it.
        decoupled_max, decoupled_min: peak and lowest rate of the token embedding and the output layer; ``None``: they
            have no rate of their own.
        scheduler: DeepSpeed's, with its ``type``, its ``params`` and the run's ``batch_sizes``; plain values of JSON.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    warmup: float
    decay: float
    style: str
    wsd_tail: float
    wsd_style: str
    start_decay: float
    end_decay: float
    decay_style: str
    total: float
    in_tokens: bool
    scheduler: dict | None = None
    decoupled_max: float | None = None
    decoupled_min: float | None = None

    def learning_rate(self, progress: float) -> float:
        """The rate for a step that starts after ``progress`` samples (or tokens)."""
        if self.scheduler is not None:
            return FORMULAS[self.scheduler["type"]](self._steps(progress), self.max_lr, **self.scheduler["params"])
        if self.warmup > 0 and progress <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * progress / self.warmup
        if self.style == "constant":
            return self.max_lr
        if progress > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(progress, 1)))
        return self.min_lr + self._coefficient(progress) * (self.max_lr - self.min_lr)

    def decoupled_rate(self, progress: float) -> float:
        """The rate of the token embedding and the output layer."""
        if self.decoupled_max is None or self.decoupled_min is None:
            return self.learning_rate(progress)
        return replace(self, max_lr=self.decoupled_max, min_lr=self.decoupled_min).learning_rate(progress)

    def _coefficient(self, progress: float) -> float:
        if self.style == "WSD":
            start = self.decay - self.wsd_tail
            return 1.0 if progress <= start else _tail(self.wsd_style, (progress - start) / self.wsd_tail)
        ratio = (progress - self.warmup) / max(self.decay - self.warmup, 1)
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)

    def betas(self, progress: float) -> tuple[float, float] | None:
        """Both betas for a step that starts there; ``None``: the optimizer's own."""
        if self.scheduler is None or self.scheduler["type"] != "OneCycle":
            return None
        return one_cycle_betas(self._steps(progress), **self.scheduler["params"])

    def _steps(self, progress: float) -> int:
        """Steps taken; with a scheduler, progress is measured in samples."""
        assert self.scheduler is not None
        return BatchSizes(tuple(map(tuple, self.scheduler["batch_sizes"]))).steps_within(int(progress))

    def weight_decay(self, progress: float) -> float:
        """The decay for a step that starts after ``progress`` samples (or tokens)."""
        if self.decay_style == "constant" or progress > self.total:
            return self.end_decay
        ratio = progress / self.total
        coefficient = ratio if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start_decay + coefficient * (self.end_decay - self.start_decay)


def _tail(style: str, ratio: float) -> float:
    return {
        "linear": 1.0 - ratio,
        "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
        "exponential": 2.0 * 0.5**ratio - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(ratio),
    }[style]


def make_schedule(config: Config, train_samples: int) -> Schedule:
    """The schedule of a configuration.

    Args:
        train_samples: number of samples in the whole run.
    """
    o = config.optimizer
    lengths = schedule_lengths(o, config.batch, config.model.seq_length, train_samples)
    constant = o.weight_decay_incr_style == "constant"
    decoupled_min = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    return Schedule(
        max_lr=o.lr,
        min_lr=o.min_lr,
        init_lr=o.lr_warmup_init,
        warmup=lengths.warmup,
        decay=lengths.decay,
        style=o.lr_decay_style,
        wsd_tail=lengths.tail,
        wsd_style=o.lr_wsd_decay_style,
        start_decay=o.weight_decay if constant else o.start_weight_decay,
        end_decay=o.weight_decay if constant else o.end_weight_decay,
        decay_style=o.weight_decay_incr_style,
        total=lengths.total,
        in_tokens=lengths.in_tokens,
        scheduler=_scheduler(config),
        decoupled_max=o.decoupled_lr,
        decoupled_min=None if o.decoupled_lr is None else decoupled_min,
    )


def _scheduler(config: Config) -> dict | None:
    scheduler = config.optimizer.scheduler
    if scheduler is None:
        return None
    return {**scheduler, "batch_sizes": [list(step) for step in BatchSizes.of(config.batch).steps]}
