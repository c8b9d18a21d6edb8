"""Steps of the tiny model: any number of micro-batches of two samples, from other tokens in each step."""

import torch

from gptpar.data.loader import MicroBatch
from gptpar.run.trainer import Trainer
from tests.helpers import random_tokens


def forward_backward(trainer: Trainer, number: int, count: int, length: int = 16) -> torch.Tensor:
    parts = random_tokens(2 * count, length, 60, seed=number).split(2)
    return trainer.forward_backward([MicroBatch(one[:, :-1], one[:, 1:]) for one in parts], number)


def update(trainer: Trainer, loss: torch.Tensor, number: int, count: int) -> list[float]:
    """Returns the readings: loss, norm, whether the step is skipped, and more."""
    launched = trainer.update(loss, iteration=number + 1, samples=2 * count, progress=2 * number + 2, stop=False)
    return launched.readings.read()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The master weights after the last step, each in one piece."""
    trainer.engine.finish()
    weights = trainer.engine.optimizer.state_tensors()["weights"].items()
    return {name: torch.cat([part.flatten() for _, part in held.parts]) for name, held in weights}
