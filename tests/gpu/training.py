"""Steps of the tiny model on a device."""

from collections.abc import Callable

import torch

from gptpar.data.loader import MicroBatch
from gptpar.optim.schedule import make_schedule
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import random_tokens, tiny_config

STEPS = 8


def whole_samples(tokens_BT: torch.Tensor) -> MicroBatch:
    """A micro-batch without masks."""
    return MicroBatch(tokens_BT[:, :-1], tokens_BT[:, 1:])


def run(
    device: str, flags: str, micro_batch: Callable[[torch.Tensor], MicroBatch] = whole_samples
) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of a few steps of two micro-batches each.

    Args:
        micro_batch: makes one of two samples [2, 17].
    """
    config = tiny_config(f"--hidden-size 128 --global-batch-size 4 {flags}")
    schedule = make_schedule(config, BatchPlan.of(config.batch).train_samples)
    trainer = Trainer(config, Topology(Mesh(), 0, torch.device(device)), schedule)
    trainer.initialise()
    torch._dynamo.reset()  # trainings of one process share the limit of recompilations
    losses = []
    for step in range(STEPS):
        parts = [micro_batch(tokens) for tokens in random_tokens(4, 16, 60, seed=step).split(2)]
        loss = trainer.forward_backward(parts, step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4 + step, stop=False)
        losses.append(launched.readings.read()[0])
    return losses, trainer.engine.optimizer.master.cpu()
