"""Steps of the tiny model on a device."""

from __future__ import annotations

import torch

from gptpar.data.loader import MicroBatch
from gptpar.optim.schedule import make_schedule
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import random_tokens, tiny_config

STEPS = 8


def run(device: str, flags: str) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of a few steps of two micro-batches each."""
    config = tiny_config(f"--hidden-size 128 --global-batch-size 4 {flags}")
    schedule = make_schedule(config, BatchPlan.of(config.batch).train_samples)
    trainer = Trainer(config, Topology(Mesh(), 0, torch.device(device)), schedule)
    trainer.initialise()
    losses = []
    for step in range(STEPS):
        parts = [MicroBatch(t[:, :-1], t[:, 1:]) for t in random_tokens(4, 16, 60, seed=step).split(2)]
        loss = trainer.forward_backward(parts, step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4 + step, stop=False)
        losses.append(launched.readings.read()[0])
    return losses, trainer.engine.optimizer.master.cpu()
