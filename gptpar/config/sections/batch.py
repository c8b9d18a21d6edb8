"""Flags of the batch and of the length of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from gptpar.config.fields import NEVER, Open, flag

MEASURED_STEPS = 10
"""Steps after which ``--train-minutes`` fixes the length of a run. The first of them also warms up and is not timed."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Generic[Open]):
    """The batch of every step, and the length of the run."""

    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "grow the global batch from START by INCREMENT up to --global-batch-size over SAMPLES samples",
        metavar="START INCREMENT SAMPLES",
        counts=True,
        most=10**13,
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        "change the global batch at these numbers of tokens (K, M, B, T: thousands to trillions); the first is 0, the "
        "last SIZE is the --global-batch-size; for example 0:16 2.4B:320 4.8B:624",
        metavar="TOKENS:SIZE",
    )
    train_iters: int | None = flag(None, "train for this many steps", least=1, most=10**10, counts=True)
    train_samples: int | None = flag(None, "train on this many samples, such as 20M", least=1, most=10**13, counts=True)
    train_minutes: float | None = flag(
        None,
        "after ten steps, lower --train-iters to the number of steps that fit into this many minutes of training; the "
        "schedule follows, a checkpoint keeps the number, and the data stay those of --train-iters",
        above=0,
    )
    train_iters_needed: int | None = flag(
        None,
        "say so if fewer steps than this fit into --train-minutes: too few to learn more than token frequencies",
        least=1,
    )
    exit_interval: int | None = flag(
        None, "save and stop after an iteration divisible by this; 0 is none", least=0, most=NEVER
    )
    exit_duration_in_mins: float | None = flag(None, "save and stop after this many minutes; 0 is never", least=0)
    kill_switch_path: str | None = flag(
        None,
        "save and stop after the step in which this file or folder appears; it must not be there at the start",
        names=("--kill-switch-file",),
    )

    batch_sizes: tuple[tuple[int, int], ...] | None = None
    """--step-batch-size-schedule in samples: (first sample, batch from there on); filled with the sequence length."""
    sample_limit: int | None = None
    """--train-tokens in samples; filled with the sequence length."""

    micro_batch_size: int | Open = flag(
        None, "samples one process runs at once", least=1, most=1_000_000, names=("--batch-size",)
    )
    global_batch_size: int | Open = flag(
        None, "samples in one step, over all processes (default: micro x processes)", least=1, most=100_000_000
    )

    def adds_gradients(self, world_size: int) -> bool:
        """Whether a step's gradient is a sum, over micro-batches or processes.

        Sums are kept in fp32 or wider. A gradient that comes once is kept as it comes: it gains nothing by being
        widened.
        """
        return world_size > 1 or not is_one_micro_batch(self)


@dataclass(frozen=True, kw_only=True)
class BatchFlags(BatchConfig[None]):
    """How much is trained on in a step, and for how long."""

    gradient_accumulation_steps: int | None = flag(
        None,
        "micro-batches in one step of a process; with any two of global batch, micro-batch and this the third follows",
        names=("--gas",),
        least=1,
        most=100_000_000,
    )
    train_tokens: int | None = flag(
        None,
        "train on this many tokens, such as 1.5B; beside --train-samples or --train-iters, the limit reached first "
        "ends the run",
        least=1,
        most=10**17,
        counts=True,
    )


def is_one_micro_batch(batch: BatchConfig[None]) -> bool:
    """Whether every step of one process is a single micro-batch."""
    grows = batch.rampup_batch_size is not None or batch.batch_sizes is not None
    return not grows and batch.global_batch_size == batch.micro_batch_size
