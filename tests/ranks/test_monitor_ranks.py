"""The curves of an engine on two processes: the first process writes the mean of all losses."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.spawn import spawn
from tests.unit.deepspeed.engines.test_monitor import LOSS, csv_of, make, monitors


def losses_and_curve(rank: int, folder: Path) -> tuple[list[float], list[tuple[int, float]]]:
    engine = make(zero_optimization={"stage": 1}, **monitors(folder))
    losses = []
    for seed in (1, 2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + rank))
        for _ in range(2):
            loss = engine(x).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    engine.close()
    dist.barrier()
    return losses, csv_of(folder, LOSS)


def test_the_loss_is_the_mean_over_micro_batches_and_processes(tmp_path: Path) -> None:
    (mine, curve), (others, _) = spawn(losses_and_curve, 2, tmp_path)
    means = [sum(mine[i : i + 2] + others[i : i + 2]) / 4 for i in (0, 2)]
    assert [samples for samples, _ in curve] == [12, 24]
    assert [loss for _, loss in curve] == pytest.approx(means, rel=1e-6)
