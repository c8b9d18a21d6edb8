"""``BatchPlan``: the size of each global batch and the number of steps, by the samples consumed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gptpar.config import BatchConfig
from gptpar.config.batch_sizes import BatchSizes, run_samples
from gptpar.run.progress import Progress


@dataclass(frozen=True)
class BatchPlan:
    """A run's steps as a function of the samples consumed so far.

    Attributes:
        sizes: of the batches.
        train_samples: consumed when the run is over; what is left over is less than a batch.
        train_iters: the last step of a run that is measured in steps; ``train_samples`` may end it earlier.
        done: where the run goes on.
    """

    sizes: BatchSizes
    train_samples: int
    train_iters: int | None = None
    done: Progress = field(default_factory=Progress)

    @staticmethod
    def of(batch: BatchConfig, done: Progress | None = None) -> BatchPlan:
        """Plan from a resolved configuration.

        Args:
            done: where the run goes on; its batches so far may have had another size.
        """
        done = done or Progress()
        plan = BatchPlan.as_configured(batch, done)
        if batch.train_minutes is None or done.fitted_iters is None:
            return plan
        return plan.ending_at(done.fitted_iters, done)

    @staticmethod
    def as_configured(batch: BatchConfig, done: Progress) -> BatchPlan:
        """Plan without ``--train-minutes``: the order of the samples depends on no machine's speed."""
        total = run_samples(batch, done.iteration, done.consumed_samples)
        return BatchPlan(BatchSizes.of(batch), total, batch.train_iters, done)

    def ending_at(self, train_iters: int, done: Progress) -> BatchPlan:
        """A plan of the same batches with at most ``train_iters`` steps in all; ``done`` says where the run is."""
        total = self.sizes.samples_after(train_iters - done.iteration, done.consumed_samples)
        return replace(self, train_iters=train_iters, train_samples=min(total, self.train_samples), done=done)

    @property
    def full(self) -> int:
        """The batch that the sizes end with; evaluations read as many samples at once."""
        return self.sizes.last

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples in the step that starts after ``consumed_samples``."""
        return self.sizes.at(consumed_samples)

    def finished(self, done: Progress) -> bool:
        """Whether no step is left: the last one is taken, or what is left of the samples is less than a batch."""
        if self.train_iters is not None and done.iteration >= self.train_iters:
            return True
        return done.consumed_samples + self.global_batch_size(done.consumed_samples) > self.train_samples

    def num_iterations(self) -> int:
        """Steps in the whole run."""
        last = self.done.iteration + self.sizes.steps_within(self.train_samples, self.done.consumed_samples)
        return last if self.train_iters is None else min(last, self.train_iters)
