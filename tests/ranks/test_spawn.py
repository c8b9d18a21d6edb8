"""The helper that runs the tests of several ranks: results by rank, and every rank's story when one fails."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import spawn


def _sum_and_draw(rank: int, scale: int) -> tuple[float, float, int]:
    total = torch.tensor(float(rank * scale))
    dist.all_reduce(total)
    return total.item(), torch.rand(()).item(), torch.get_num_threads()


def _fail_on_one(rank: int) -> None:
    dist.barrier()  # on a busy machine one would leave before another has come
    if rank == 1:
        raise ValueError("rank one had enough")
    if rank == 2:
        time.sleep(0.5)  # rank 1 may still be in the barrier
        os._exit(7)
    time.sleep(600)


def test_results_come_back_by_rank_with_equal_seeds():
    assert spawn(_sum_and_draw, 2, 10) == [(10.0, torch.rand(()).item(), 1)] * 2


def test_every_rank_tells_what_happened_to_it(monkeypatch):
    monkeypatch.setattr("tests.spawn.GRACE_S", 3)
    with pytest.raises(AssertionError) as caught:
        spawn(_fail_on_one, 3)
    message = str(caught.value)
    assert "rank 1: raised" in message and "ValueError: rank one had enough" in message
    assert "rank 2: died without a word, exit code 7" in message
    assert "rank 0: did not finish; it stood at:" in message and "in _fail_on_one" in message
