"""How large each global batch is, and how many there are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config import BatchConfig


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes as a function of the samples consumed so far.

    With a ramp, the batch grows from ``start`` by ``increment`` in equal spans of the first ``ramp_samples`` samples
    (Megatron's rule), and is ``full`` afterwards.
    """

    full: int
    start: int
    increment: int
    ramp_samples: int
    train_samples: int

    @staticmethod
    def of(batch: BatchConfig) -> BatchPlan:
        """From a resolved configuration."""
        full = batch.global_batch_size
        assert full is not None
        start, increment, ramp = batch.rampup_batch_size or (full, 1, 0)
        total = batch.train_samples if batch.train_iters is None else batch.train_iters * full
        return BatchPlan(full, start, increment, ramp, total or 0)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples in the step that starts after ``consumed_samples``."""
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        span = self.ramp_samples / ((self.full - self.start) / self.increment)
        return min(self.full, self.start + int(consumed_samples / span) * self.increment)

    def finished(self, consumed_samples: int) -> bool:
        """Whether no whole step is left."""
        return consumed_samples + self.global_batch_size(consumed_samples) > self.train_samples

    def num_iterations(self) -> int:
        """Steps in the whole run."""
        consumed = steps = 0
        while consumed <= self.ramp_samples and not self.finished(consumed):
            consumed += self.global_batch_size(consumed)
            steps += 1
        return steps + max(0, self.train_samples - consumed) // self.full
