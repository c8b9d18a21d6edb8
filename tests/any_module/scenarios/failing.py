"""Passes that end in an error: the user catches it and calls the model again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.any_module.case import Batch, Case, Model, Setup
from tests.any_module.harness import Training
from tests.any_module.reference import Trace
from tests.any_module.scenarios.beside import TrainsByBatch
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
        try:
            yield
        except error as raised:
            assert str(raised) == "as it was told to"
        else:
            raise AssertionError("the model's exception is lost")
        finally:
            self.failing_in = ""


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """The model's own."""
    return model(batch["x"], batch["y"])


class ForwardFails(Training):
    """An exception in a forward pass, in the first micro-batch of a step and in the last; then the same once more."""

    def __init__(self, case: Case, setup: Setup, engine: str, error: type[Exception]):
        super().__init__(case, setup, engine)
        self.error = error

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) in ((0, 0), (2, 0), (3, self.setup.accumulation - 1)):
            batch = self.make_batch(step, micro)
            with self.model.expected("forward", self.error):
                self.engine(batch["x"], batch["y"])


class BackwardFails(ForwardFails):
    """An exception in a backward pass: the step begins again, with its first micro-batch."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) not in ((0, 0), (2, 0), (3, self.setup.accumulation - 1)):
            return
        with self.model.expected("backward", self.error):
            self.engine.backward(loss_of(self.engine, self.make_batch(step, micro)))
        for again in range(micro):
            self.engine.backward(loss_of(self.engine, self.make_batch(step, again)))
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


def failing(name: str, training: Callable[..., Any], **given: Any) -> Case:
    """A case of two micro-batches, so that one in the middle of a step can fail."""
    return Case(name, Raises, loss=loss_of, training=partial(training, **given), micro_batches=2)


FAILING = [
    failing("exception_in_forward", ForwardFails, error=ValueError),
    failing("out_of_memory_in_forward", ForwardFails, error=torch.OutOfMemoryError),
    failing("exception_in_backward", BackwardFails, error=ValueError),
    failing("out_of_memory_in_backward", BackwardFails, error=torch.OutOfMemoryError),
    failing("out_of_memory_in_train_batch", TrainBatchFails),
]
