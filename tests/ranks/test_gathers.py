"""Gathers of parameters that other processes begin late."""

import time

import torch

from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.spawn import spawn


def new_weights_while_the_old_ones_are_gathered(rank: int, words: str) -> list[float]:
    """The parameters' values after two publications in a row; rank 1 joins the first one late."""
    trainer = make_trainer(tiny_config(f"{words} --micro-batch-size 1 --global-batch-size 2", 2), rank, Mesh(data=2))
    engine, found = trainer.engine, set()
    with engine.gatherer.held():
        pass
    for value in (3.0, 7.0):
        for weights in engine.optimizer.state_tensors()["weights"].values():
            weights.fill(torch.full(weights.shape, value))
        if rank == 1 and value == 3.0:
            time.sleep(0.5)
        engine.publish()
    with engine.gatherer.held():
        for views in engine.parameters.views().values():
            found |= set(views.flatten().tolist())
    trainer.close()
    return sorted(found)


def of_both_formats(rank: int) -> list[list[float]]:
    formats = ("--zero-stage 1", "--zero-stage 1 --bf16")
    return [new_weights_while_the_old_ones_are_gathered(rank, words) for words in formats]


def test_a_gather_that_ends_late_overwrites_no_newer_values() -> None:
    """A resumed run loads its weights right after the gathers of its initial ones have begun."""
    assert spawn(of_both_formats, 2) == [[[7.0], [7.0]]] * 2
