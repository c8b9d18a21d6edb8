"""Passes that end in an error: the user catches it and calls the model again."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from tests.any_module.case import Case
from tests.any_module.harness import Training
from tests.any_module.reference import Trace
from tests.any_module.scenarios.beside import TrainsByBatch, loss_inside
from tests.any_module.zoo import Mlp


class Raises(Mlp):
    """Returns its loss. Fails between its blocks when it is told to, in the forward pass or in the backward pass."""

    failing_in = ""
    error: type[Exception] = ValueError

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.blocks[1](self.blocks[0](self.first(x)))
        if self.failing_in == "forward":
            self.fail()
        if self.failing_in == "backward":
            x.register_hook(self.fail)
        return F.mse_loss(self.last(self.blocks[2](x)), y)

    def fail(self, *_: torch.Tensor) -> None:
        """With the error that is set."""
        raise self.error("as it was told to")

    @contextmanager
    def expected(self, failing_in: str, error: type[Exception]) -> Iterator[None]:
        """A context in which the model fails, and the error reaches the user."""
        self.failing_in, self.error = failing_in, error
        with pytest.raises(error, match="as it was told to"):
            yield
        self.failing_in = ""


class ForwardFails(Training):
    """An exception in a forward pass, in the first micro-batch of a step and in the last; then the same once more."""

    failing_at = ((0, 0), (2, 0), (3, 1))
    """(step, micro-batch): a case has two micro-batches, so that one in the middle of a step can fail."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) in self.failing_at:
            batch = self.make_batch(step, micro)
            with self.model.expected("forward", ValueError):
                self.engine(batch["x"], batch["y"])


class BackwardFails(ForwardFails):
    """An exception in a backward pass: the step begins again, with its first micro-batch."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) not in self.failing_at:
            return
        with self.model.expected("backward", torch.OutOfMemoryError):
            self.engine.backward(loss_inside(self.engine, self.make_batch(step, micro)))
        for again in range(micro):
            self.engine.backward(loss_inside(self.engine, self.make_batch(step, again)))
            self.engine.step()


class TrainBatchFails(TrainsByBatch):
    """An exception in ``train_batch``, in a forward pass and in a backward pass; then the same step once more."""

    def run(self, start: int, stop: int) -> Trace:
        for step in range(start, stop):
            if step in (1, 3):
                with self.model.expected("forward" if step == 1 else "backward", torch.OutOfMemoryError):
                    self.engine.train_batch(self.batches(step))
            super().run(step, step + 1)
        return self.trace


FAILING = [
    Case("exception_in_forward", Raises, loss=loss_inside, training=ForwardFails, micro_batches=2),
    Case("out_of_memory_in_backward", Raises, loss=loss_inside, training=BackwardFails, micro_batches=2),
    Case("out_of_memory_in_train_batch", Raises, loss=loss_inside, training=TrainBatchFails, micro_batches=2),
]
