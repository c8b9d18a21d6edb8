"""Steps of the tiny model, and a hash of all that they leave."""

import hashlib

import torch

from gptpar.data.loader import MicroBatch
from gptpar.run.trainer import Trainer
from tests.helpers import random_tokens

OFFLOAD = "--cpu-optimizer --cpu-optimizer-ratio"


def batches(step: int, count: int) -> list[MicroBatch]:
    return [MicroBatch(t[:, :-1], t[:, 1:]) for t in random_tokens(4, 16, 60, seed=step).split(4 // count)]


def train(trainer: Trainer, first: int, last: int, count: int = 2) -> list[list[float]]:
    """Loss, norm and skipped of each step; the schedule follows the step."""
    seen = []
    for step in range(first, last):
        trainer.expect_step(4.0 * step)
        loss = trainer.forward_backward(batches(step, count), step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
        numbers = launched.readings.read()
        trainer.loss_scale.update(bool(numbers[2]))
        seen.append(numbers[:3])
    return seen


def config_words(words: str) -> str:
    return f"--global-batch-size 4 --lr-warmup-iters 3 --weight-decay 0.1 {words}"


RATIOS = ["0", "0.731", "1"]
"""None of them cuts between parameters."""


def hash_of(trainer: Trainer) -> str:
    """Of the master weights, moments and model parameters that a process holds."""
    state = hashlib.sha256()
    for kind, views in sorted(trainer.engine.optimizer.state_tensors().items()):
        for name, view in sorted(views.items()):
            elements = [part.flatten().clone() for _, part in sorted(view.parts, key=lambda item: item[0])]
            state.update(f"{kind}/{name}".encode() + torch.cat(elements).view(torch.uint8).numpy().tobytes())
    for unit in trainer.engine.table.units:
        state.update(trainer.engine.parameters.shards[unit.name].clone().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


ALL = "--cpu-optimizer --cpu-optimizer-ratio 1"
