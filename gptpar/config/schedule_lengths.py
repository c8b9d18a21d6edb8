"""Converts the lengths of the learning-rate schedule's parts to one unit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.batch_sizes import BatchSizes

if TYPE_CHECKING:
    from gptpar.config import BatchConfig, Flags, OptimizerConfig


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of a learning rate schedule, in samples, or in tokens where one of the flags that count tokens is given.

    Attributes:
        warmup: length until the peak rate.
        decay: length until the lowest rate, warm-up included.
        tail: length of WSD's decay, which ends where ``decay`` does.
        total: length of the run.
    """

    warmup: float
    decay: float
    tail: float
    total: float
    in_tokens: bool


LENGTHS = (
    *(f"lr_{part}_{unit}" for part in ("decay", "warmup") for unit in ("iters", "samples", "tokens")),
    *("lr_warmup_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "scheduler"),
)
"""Fields of the optimizer's section that say how long a part of the schedule is."""


def without_lengths(flags: Flags) -> Flags:
    """Flags for a few steps that are no run: nothing is warmed up, and what decays does so over these steps."""
    default = type(flags.optimizer)()
    if flags.optimizer.lr_decay_style == "WSD":  # cannot be without a length
        flags = flags.update("optimizer", lr_decay_style="constant")
    return flags.update("optimizer", **{name: getattr(default, name) for name in LENGTHS})


def schedule_lengths(
    optimizer: OptimizerConfig, batch: BatchConfig, seq_length: int, train_samples: int
) -> ScheduleLengths:
    """Translate the fields; steps are as many samples as the batches of the run's first steps hold.

    Args:
        train_samples: samples in the whole run.
    """
    o, sizes = optimizer, BatchSizes.of(batch)
    after = sizes.samples_after
    in_tokens = o.lr_decay_tokens is not None or o.lr_warmup_tokens is not None
    unit = seq_length if in_tokens else 1
    decay: float = (o.lr_decay_samples or after(o.lr_decay_iters or 0) or train_samples) * unit
    if o.lr_decay_tokens is not None:
        decay = o.lr_decay_tokens
    warmup: float = (o.lr_warmup_samples or after(o.lr_warmup_iters)) * unit
    if o.lr_warmup_tokens is not None:
        warmup = o.lr_warmup_tokens
    elif o.lr_warmup_fraction is not None:
        warmup = o.lr_warmup_fraction * decay
    tail = o.lr_wsd_decay_samples or _samples_of_tail(o, batch, sizes)
    return ScheduleLengths(warmup, decay, tail * unit, train_samples * unit, in_tokens)


def _samples_of_tail(o: OptimizerConfig, batch: BatchConfig, sizes: BatchSizes) -> int:
    """Samples in WSD's tail, the last steps of the decay; steps before the run's first one count as that one."""
    end, last_steps = o.lr_decay_iters or batch.train_iters or 0, o.lr_wsd_decay_iters or 0
    within = sizes.samples_after(end) - sizes.samples_after(end - last_steps)
    return within + max(0, last_steps - end) * sizes.at(0)
