"""An error in a pipeline's ``train_batch``, which the training loop catches before it calls it again."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.guards import failed_passes
from tests.any_module.pipeline_layers import Divided, data_of, fp64, layers, loss_of
from tests.spawn import RankPool, RanksFailed

STEPS, FAILING = 5, (1, 3)


class Fails(nn.Module):
    """A layer without parameters, in the last stage; ``left`` calls later, one raises."""

    left = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("as it was told to")
        return x


def train(rank: int, divided: Divided, *, fails: bool) -> list[float]:
    """The losses; in some steps the second micro-batch fails first."""
    with fp64():
        layer, listed = Fails(), layers()
        engine, *_ = gptpar.initialize(
            model=[*listed[:8], layer, *listed[8:]], loss_fn=loss_of, config=divided.config()
        )
        losses, data = [], list(_steps(engine))
        for step in range(STEPS):
            if fails and step in FAILING:
                layer.left = 2
                with pytest.raises(torch.OutOfMemoryError, match="as it was told to"):
                    engine.train_batch(iter(data[step]))
            losses.append(engine.train_batch(iter(data[step])).item())
        engine.close()
    return losses


def _steps(engine: Any) -> Any:
    """This process's micro-batches of each step."""
    data, count = data_of(engine), engine.gradient_accumulation_steps()
    return ([next(data) for _ in range(count)] for _ in range(STEPS))


def failing(rank: int, divided: Divided) -> list[float]:
    with patch.object(failed_passes, "WAIT_SECONDS", 0.5):
        return train(rank, divided, fails=True)


def undisturbed(rank: int, divided: Divided) -> list[float]:
    return train(rank, divided, fails=False)


@pytest.mark.parametrize("divided", [Divided(1, 1, 0, 0.6), Divided(2, 1, 2), Divided(2, 1, 3, 1.0)], ids=str)
def test_what_fails_on_all_processes_leaves_nothing_behind(divided: Divided) -> None:
    with RankPool(divided.world) as ranks:
        assert ranks.run(failing, divided) == ranks.run(undisturbed, divided)


def test_what_fails_in_one_stage_is_told() -> None:
    with RankPool(2) as ranks, pytest.raises(RanksFailed) as caught:
        ranks.run(failing, Divided(2, 2, 1))
    told = "rank 0 told of none within 0.5 seconds, rank 1 met an error in train_batch of step 2, micro-batch 1"
    assert told in caught.value.reports[1]
