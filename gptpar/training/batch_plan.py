"""How large each global batch is, and how many there are. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptpar.config import BatchConfig
from gptpar.training.progress import Progress


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
    train_iters: int | None = None

    @staticmethod
    def of(batch: BatchConfig, done: Progress | None = None) -> BatchPlan:
        """From a resolved configuration.

        Args:
            done: where the run goes on; its batches so far may have had another size.
        """
        done = done or Progress()
        full = batch.global_batch_size
        assert full is not None
        start, increment, ramp = batch.rampup_batch_size or (full, 1, 0)
        if batch.train_iters is None:
            return BatchPlan(full, start, increment, ramp, batch.train_samples or 0)
        return BatchPlan(full, start, increment, ramp, 0).ending_at(batch.train_iters, done)

    def ending_at(self, train_iters: int, done: Progress) -> BatchPlan:
        """The same batches, ``train_iters`` steps in all; ``done`` says where the run is."""
        total = done.consumed_samples + max(0, train_iters - done.iteration) * self.full
        return replace(self, train_iters=train_iters, train_samples=total)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples in the step that starts after ``consumed_samples``."""
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        span = self.ramp_samples / ((self.full - self.start) / self.increment)
        return min(self.full, self.start + int(consumed_samples / span) * self.increment)

    def finished(self, done: Progress) -> bool:
        """Whether no step is left: by the count of steps where the run is given in steps, else by samples."""
        if self.train_iters is not None:
            return done.iteration >= self.train_iters
        return not self._has_room(done.consumed_samples)

    def _has_room(self, consumed_samples: int) -> bool:
        return consumed_samples + self.global_batch_size(consumed_samples) <= self.train_samples

    def num_iterations(self) -> int:
        """Steps in the whole run."""
        if self.train_iters is not None:
            return self.train_iters
        consumed = steps = 0
        while consumed <= self.ramp_samples and self._has_room(consumed):
            consumed += self.global_batch_size(consumed)
            steps += 1
        return steps + max(0, self.train_samples - consumed) // self.full
