"""Flags of the batch and of the length of the run, and whether steps can be cut evenly and saved in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from gptpar.config.batch_sizes import BatchSizes, read_schedule, run_samples
from gptpar.config.fields import NEVER, Missing, Notes, Open, completed, flag
from gptpar.config.sections.logging import EVAL_INTERVAL

if TYPE_CHECKING:
    from gptpar.config import Flags


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
        grows = self.rampup_batch_size is not None or self.batch_sizes is not None
        return world_size > 1 or grows or self.global_batch_size != self.micro_batch_size


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


MAX_INCREMENTS = 10_000
MAX_TOKENS = 10**18
"""Positions in the data are 64-bit numbers; beyond this not even a sum of them would fit."""


def check_batch(flags: Flags, world_size: int) -> Iterator[str]:
    """Whether every step's batch can be cut evenly."""
    b = flags.batch
    data_parallel = flags.parallel.data_parallel_size(world_size)
    yield from _schedule(flags, data_parallel)
    if b.micro_batch_size is None:
        yield _why_no_micro_batch(b, data_parallel)
    elif b.batch_sizes is None:
        unit = b.micro_batch_size * data_parallel
        yield from _global(b, data_parallel, unit)
        if b.rampup_batch_size is not None:
            yield from _rampup(b.rampup_batch_size, b.global_batch_size or unit, unit)


def _why_no_micro_batch(b: BatchFlags, data_parallel: int) -> str:
    """The reason why there is no micro-batch: it is missing, or the numbers do not divide."""
    steps = b.gradient_accumulation_steps
    if b.global_batch_size and steps and steps > 0:
        return (
            f"--global-batch-size {b.global_batch_size} is not a multiple of --gradient-accumulation-steps {steps} x "
            f"{data_parallel} data-parallel process(es) = {steps * data_parallel}, so there is no --micro-batch-size "
            "for it: change one of them."
        )
    return Missing("--micro-batch-size is missing: the number of samples one process runs at once, for example 4.")


def _global(b: BatchFlags, data_parallel: int, unit: int) -> Iterator[str]:
    """Whether micro-batches make up the global batch.

    Args:
        unit: samples of one micro-batch on all data-parallel processes.
    """
    steps = b.gradient_accumulation_steps
    if b.global_batch_size is not None and b.global_batch_size % unit:
        yield (
            f"--global-batch-size {b.global_batch_size} is not a multiple of --micro-batch-size "
            f"{b.micro_batch_size} x {data_parallel} data-parallel process(es) = {unit}: "
            f"the nearest that fits is {max(unit, round(b.global_batch_size / unit) * unit)}."
        )
    elif b.global_batch_size is not None and steps and steps > 0 and b.global_batch_size != unit * steps:
        yield (
            f"--global-batch-size {b.global_batch_size} is not --micro-batch-size {b.micro_batch_size} x "
            f"--gradient-accumulation-steps {steps} x {data_parallel} data-parallel process(es) = {unit * steps}: drop "
            "one of the three, or make them agree."
        )


def _rampup(ramp: tuple[int, ...], target: int, unit: int) -> Iterator[str]:
    if len(ramp) != 3:
        yield f"--rampup-batch-size takes START INCREMENT SAMPLES; {len(ramp)} value(s) were given."
        return
    start, increment, samples = ramp
    if min(ramp) < 1 or start > target:
        yield f"--rampup-batch-size {start} {increment} {samples}: positive numbers and a start <= {target} are needed."
        return
    if (target - start) // increment > MAX_INCREMENTS:
        count = (target - start) // increment
        yield (
            f"--rampup-batch-size: from {start} to {target} by {increment} is {count:,} steps; at most "
            f"{MAX_INCREMENTS:,} can be: choose a larger increment."
        )
    if (target - start) % increment:
        yield f"--rampup-batch-size: from {start} to {target} is not a whole number of steps of {increment}."
    if start % unit or increment % unit:
        yield (
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of "
            f"micro-batch x data-parallel = {unit}, or some steps could not be cut."
        )


def _schedule(flags: Flags, data_parallel: int) -> Iterator[str]:
    """--step-batch-size-schedule: whether it can be read, each of its sizes be cut, and nothing contradicts it."""
    b, name = flags.batch, "--step-batch-size-schedule"
    if b.step_batch_size_schedule is None:
        return
    if b.rampup_batch_size is not None:
        yield f"{name} and --rampup-batch-size both say how the batch grows: keep one."
    if b.gradient_accumulation_steps is not None:
        yield f"--gradient-accumulation-steps is the same for all steps, which {name} is not: drop one of them."
    if not flags.model.seq_length:
        return
    try:
        sizes = BatchSizes(read_schedule(b.step_batch_size_schedule, flags.model.seq_length))
    except ValueError as error:
        yield f"{name}: {error}."
        return
    unit = (b.micro_batch_size or 0) * data_parallel
    if unit and (uneven := [size for _, size in sizes.steps if size % unit]):
        yield (
            f"{name}: {', '.join(map(str, uneven))}: not a multiple of --micro-batch-size {b.micro_batch_size} x "
            f"{data_parallel} data-parallel process(es) = {unit}; choose such sizes (a run that is past the first ones "
            "may begin with the one it has reached)."
        )
    if b.global_batch_size != sizes.last:
        yield (
            f"--global-batch-size {b.global_batch_size} is not the last size {sizes.last} of {name}: drop it, or make "
            "them agree."
        )


def check_duration(flags: Flags) -> Iterator[str]:
    """Check how long to train, and when to save."""
    b, c = flags.batch, flags.checkpoint
    if not flags.logging.skip_train:
        yield from _length(b)
    elif not c.load:
        yield "--skip-train evaluates a checkpoint: give --load."
    if b.rampup_batch_size is not None and b.train_iters is not None:
        yield "--rampup-batch-size needs --train-samples or --train-tokens alone: with it, steps differ in size."
    if b.train_minutes is not None:
        yield from _fitted_length(flags)
    yield from _countable(flags)


def _length(b: BatchFlags) -> Iterator[str]:
    """The run's length is said once."""
    if b.train_iters is None and b.train_samples is None and b.train_tokens is None:
        yield Missing("how long to train is not said: give --train-iters, --train-samples or --train-tokens.")
    elif b.train_iters is not None and b.train_samples is not None:
        yield "how long to train is said twice (--train-iters and --train-samples): keep one."


def _countable(flags: Flags) -> Iterator[str]:
    b, log, length = flags.batch, flags.logging, flags.model.seq_length or 1
    if b.global_batch_size is None:
        return
    largest = max([b.global_batch_size, *(size for _, size in b.batch_sizes or ())])
    samples = b.train_samples or (b.train_iters or 0) * largest
    if samples * length > MAX_TOKENS:
        yield (
            f"the run would read {samples:.3g} samples x {length:,} tokens, more than the {MAX_TOKENS:.0e} that can be "
            "counted: shorten it, or lower the batch or --seq-length."
        )
    turns = (b.train_iters or samples // b.global_batch_size) // (log.eval_interval or EVAL_INTERVAL) + 1
    if log.eval_iters * turns * b.global_batch_size * length > MAX_TOKENS:
        yield (
            f"{turns:.3g} evaluations of --eval-iters {log.eval_iters} would read more than the {MAX_TOKENS:.0e} "
            "tokens that can be counted: lower it, or raise --eval-interval."
        )


def _fitted_length(flags: Flags) -> Iterator[str]:
    """The first steps are taken before their number is known: their learning rate must not depend on it."""
    b, o = flags.batch, flags.optimizer
    minutes = f"--train-minutes {b.train_minutes:g}"
    if b.train_iters is None:
        yield f"{minutes} lowers --train-iters, which is missing: give the most steps that the run may take."
    if o.lr_warmup_fraction is not None:
        yield (
            f"{minutes} chooses the number of steps after the first ten, so --lr-warmup-fraction "
            f"{o.lr_warmup_fraction:g} has no length before that: give --lr-warmup-iters."
        )
    elif o.lr_decay_style != "constant" and o.lr_warmup_iters < MEASURED_STEPS and not _has_own_lengths(flags):
        yield (
            f"{minutes} chooses the number of steps after the first {MEASURED_STEPS}, whose learning rate would follow "
            f"a decay of another length: give --lr-warmup-iters {MEASURED_STEPS} or more, or --lr-decay-iters."
        )
    if o.weight_decay_incr_style != "constant":
        yield (
            f"{minutes} chooses the number of steps after the first ten, so --weight-decay-incr-style "
            f"{o.weight_decay_incr_style} has no length before that: keep the weight decay constant."
        )


def _has_own_lengths(flags: Flags) -> bool:
    """Whether warm-up or decay are measured otherwise than in steps of this run."""
    o = flags.optimizer
    lengths = (o.lr_decay_iters, o.lr_decay_samples, o.lr_decay_tokens, o.lr_warmup_samples, o.lr_warmup_tokens)
    return any(lengths) or o.scheduler is not None


def check_first_step(flags: Flags) -> Iterator[str]:
    """Whether there is anything to train; the batches and the length must be in order."""
    if flags.logging.skip_train or (flags.batch.train_samples is None and flags.batch.sample_limit is None):
        return  # --train-iters is a step or more
    b = completed(BatchConfig, flags.batch)
    samples, first = run_samples(b), BatchSizes.of(b).at(0)
    if samples < first:
        yield (
            f"the run has no step: it ends after {samples:,} samples, and its first batch has {first:,}: train on "
            "more, or lower the batch."
        )


def derive_batch(notes: Notes, world_size: int) -> None:
    _derive_schedule(notes)
    batch = notes.flags.batch
    data_parallel = notes.flags.parallel.data_parallel_size(world_size)
    steps = batch.gradient_accumulation_steps
    if steps and batch.global_batch_size and batch.global_batch_size % (steps * data_parallel) == 0:
        reason = (
            f"batch {batch.global_batch_size} / ({steps} micro-batches x {data_parallel} data-parallel process(es))"
        )
        notes.fill("batch", "micro_batch_size", batch.global_batch_size // (steps * data_parallel), reason)
    batch = notes.flags.batch
    if batch.micro_batch_size:
        reason = f"micro-batch {batch.micro_batch_size} x {data_parallel} data-parallel process(es)"
        unit = batch.micro_batch_size * data_parallel
        times = f" x {steps} a step" if steps else ""
        notes.fill("batch", "global_batch_size", unit * (steps or 1), reason + times)
        full = notes.flags.batch.global_batch_size
        if full and unit > 0 and full % unit == 0:
            notes.add("micro batches per step", full // unit, f"batch {full} / ({reason})")
    _derive_length(notes)
    for name in ("exit_interval", "exit_duration_in_mins"):
        notes.drop_zero("batch", name)


def _derive_schedule(notes: Notes) -> None:
    """Derive the sizes of --step-batch-size-schedule; the checks report one that cannot be read."""
    words, seq_length = notes.flags.batch.step_batch_size_schedule, notes.flags.model.seq_length
    if words is None or not seq_length:
        return
    with contextlib.suppress(ValueError):
        notes.flags = notes.flags.update("batch", batch_sizes=read_schedule(words, seq_length))
        last = BatchSizes(notes.flags.batch.batch_sizes or ()).last
        notes.fill("batch", "global_batch_size", last, "the last of --step-batch-size-schedule")


def _derive_length(notes: Notes) -> None:
    """Derive the run's length: of --train-tokens and what is given beside it, whichever is reached first ends it."""
    batch, seq_length = notes.flags.batch, notes.flags.model.seq_length
    if not batch.train_tokens or not seq_length:
        return
    limit = -(-batch.train_tokens // seq_length)
    reason = f"{batch.train_tokens:,} tokens / {seq_length} a sample"
    notes.flags = notes.flags.update("batch", sample_limit=limit)
    if batch.train_iters is not None:
        _first_of_steps_and_tokens(notes, limit, reason)
    elif batch.train_samples is None:
        notes.fill("batch", "train_samples", limit, reason)
    elif batch.train_samples > limit:
        first = f"{reason}, reached before --train-samples {batch.train_samples:,}"
        notes.replace("batch", "train_samples", limit, first)
    elif batch.train_samples < limit:
        notes.add("train samples", batch.train_samples, f"reached before --train-tokens {batch.train_tokens:,}")


def _first_of_steps_and_tokens(notes: Notes, limit: int, reason: str) -> None:
    batch = notes.flags.batch
    if batch.global_batch_size is None or batch.rampup_batch_size is not None:
        return  # the checks report it
    steps = BatchSizes(batch.batch_sizes or ((0, batch.global_batch_size),)).steps_within(limit)
    if steps < (batch.train_iters or 0):
        notes.add("last iteration", steps, f"{reason}, reached before --train-iters {batch.train_iters}")
    else:
        notes.add("last iteration", batch.train_iters, f"reached before --train-tokens {batch.train_tokens:,}")
