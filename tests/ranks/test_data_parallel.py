"""The same numbers on any number of data-parallel processes."""

from __future__ import annotations

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.spawn import spawn

GLOBAL_BATCH, STEPS = 8, 4
FLAGS = f"--fp64 --micro-batch-size 1 --global-batch-size {GLOBAL_BATCH} --clip-grad 0.3"
FLAGS += " --hidden-dropout 0.1 --attention-dropout 0.1"

Result = tuple[list[float], list[float], torch.Tensor, torch.Tensor]


def run(rank: int, data: int) -> Result:
    """Losses, gradient norms, the last gradient sum and the weights after a few steps."""
    config = tiny_config(FLAGS, world_size=data)
    trainer = make_trainer(config, rank, Mesh(data=data))
    losses, norms = [], []
    for step in range(STEPS):
        tokens = random_tokens(GLOBAL_BATCH, 16, 60, seed=step)
        mine = tokens.view(GLOBAL_BATCH // data, data, 1, 17)[:, rank]  # micro-batch j of rank r: sample j * dp + r
        loss = trainer.forward_backward([MicroBatch(t[:, :-1], t[:, 1:]) for t in mine], step)
        grads = trainer.engine.gradients.shard.clone()
        launched = trainer.update(loss, iteration=step, samples=GLOBAL_BATCH, progress=10 + step, stop=rank == 1)
        mean, norm, _, votes = launched.readings.read()
        assert votes == (1 if data > 1 else 0)
        losses.append(mean)
        norms.append(norm)
    return losses, norms, grads, trainer.engine.optimizer.master.clone()


@pytest.mark.parametrize("data", [2, 4])
def test_processes_agree_with_one(data: int) -> None:
    """Loss, norm, every gradient and every weight in fp64 to 1e-12, with clipping and dropout on.

    Weights start at 0.02, so 1e-12 is round-off; a key's bias has no gradient but round-off, which Adam magnifies.
    """
    alone = run(0, 1)
    for result in spawn(run, data, data):
        torch.testing.assert_close(result, alone, rtol=1e-12, atol=1e-12)
    assert min(alone[1]) > 0.3, "clipping must be active"
