"""The global batch size as a function of the samples consumed, and the schedule's lengths in one unit. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gptpar.system.quantities import read_count

if TYPE_CHECKING:
    from gptpar.config import BatchConfig, Flags, OptimizerConfig

MAX_COUNT = 10**17
MAX_BATCH = 100_000_000


@dataclass(frozen=True)
class BatchSizes:
    """Sizes that hold from a sample on, in order; the first holds from sample 0 on.

    A step has the size that holds where it starts; it may end beyond the place where the next size begins.
    """

    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(batch: BatchConfig) -> BatchSizes:
        """A schedule, a growing batch, or one size."""
        if batch.batch_sizes is not None:
            return BatchSizes(batch.batch_sizes)
        if batch.rampup_batch_size is not None:
            start, increment, samples = batch.rampup_batch_size
            return BatchSizes(tuple(_ramp(start, increment, samples, batch.global_batch_size)))
        return BatchSizes(((0, batch.global_batch_size),))

    @property
    def last(self) -> int:
        """The size that holds to the end."""
        return self.steps[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Samples in the step that starts after ``consumed_samples``."""
        return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1][1]

    def samples_after(self, num_steps: int, consumed_samples: int = 0) -> int:
        """Samples consumed once ``num_steps`` more steps are taken."""
        left = max(0, num_steps)
        for size, count in self._counts(consumed_samples):
            taken = left if count is None else min(left, count)
            consumed_samples += taken * size
            left -= taken
            if not left:
                break
        return consumed_samples

    def steps_within(self, samples: int, consumed_samples: int = 0) -> int:
        """Whole steps that can be taken before more than ``samples`` are consumed."""
        num_steps = 0
        for size, count in self._counts(consumed_samples):
            room = max(0, samples - consumed_samples) // size
            taken = room if count is None else min(room, count)
            num_steps += taken
            consumed_samples += taken * size
            if taken != count:
                break
        return num_steps

    def _counts(self, consumed: int) -> Iterator[tuple[int, int | None]]:
        """(size, number of steps that start with it) from a place on; ``None``: without end."""
        for (_, size), (end, _) in pairwise(self.steps):
            if consumed < end:
                count = -(-(end - consumed) // size)
                yield size, count
                consumed += count * size
        yield self.last, None


def run_samples(batch: BatchConfig, steps_done: int = 0, consumed_samples: int = 0) -> int:
    """Samples after which a run is over.

    Args:
        steps_done, consumed_samples: where the run goes on; its batches so far may have had another size.
    """
    if batch.train_iters is None:
        return batch.train_samples or 0
    samples = BatchSizes.of(batch).samples_after(batch.train_iters - steps_done, consumed_samples)
    return samples if batch.sample_limit is None else min(samples, batch.sample_limit)


def _ramp(start: int, increment: int, samples: int, full: int) -> Iterator[tuple[int, int]]:
    """Megatron's growing batch: ``start + int(consumed / span) * increment``, ``full`` beyond the ramp's samples."""
    yield 0, start
    count = (full - start) // increment
    for number in range(1, count + 1):
        span = samples / count
        first = int(number * span)
        # Megatron divides in floating point: find the first sample that its quotient assigns to this size.
        while int(first / span) >= number:
            first -= 1
        while int(first / span) < number:
            first += 1
        yield min(first, samples + 1), start + number * increment


def read_schedule(words: Sequence[str], seq_length: int) -> tuple[tuple[int, int], ...]:
    """``0:16 2.4B:320`` as (first sample, size), in order; Megatron-LM's format, whose thresholds are tokens.

    Raises:
        ValueError: every reason why it is none, as parts of a sentence.
    """
    problems: list[str] = []
    found: list[tuple[int, int]] = []
    for entry in " ".join(words).replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        try:
            if not colon:
                raise ValueError("TOKENS:SIZE is needed, for example 2.4B:320")
            found.append((read_count(threshold, MAX_COUNT) // seq_length, _whole_batch(size)))
        except ValueError as error:
            problems.append(f"{entry[:40]!r}: {error}")
    found.sort()
    if not problems:
        problems += _order_problems(found, seq_length)
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(found)


def _order_problems(found: Sequence[tuple[int, int]], seq_length: int) -> Iterator[str]:
    if not found or found[0][0] != 0:
        yield "the first size must begin at 0 tokens, for example 0:16"
    for (first, size), (again, other) in pairwise(found):
        if first == again:
            yield f"the sizes {size} and {other} begin at the same sample ({first:,}, of {seq_length:,} tokens each)"


def _whole_batch(text: str) -> int:
    size = read_count(text, MAX_BATCH)
    if size < 1:
        raise ValueError("a size must be at least 1")
    return size


# The lengths of the learning-rate schedule's parts.


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
NO_CORPUS = dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path", "split"))


def on_made_up_data(flags: Flags) -> Flags:
    """Flags for a few steps that are no run: no corpus is read, no rate need be given, nothing is warmed up.

    What decays does so over these steps.
    """
    default = type(flags.optimizer)()
    flags = flags.update("data", mock_data=True, **NO_CORPUS)
    if flags.optimizer.lr is None:
        flags = flags.update("optimizer", lr=3e-4)
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
