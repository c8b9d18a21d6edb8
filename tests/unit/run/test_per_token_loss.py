"""--calculate-per-token-loss: tokens that count are weighed alike, however a process divides a step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gptpar.data.loader import MicroBatch
from tests.helpers import make_trainer, random_tokens, tiny_config

TOKENS = random_tokens(8, 16, 60)
MASK = (random_tokens(8, 15, 100, seed=1) < torch.tensor([5, 90, 40, 100, 10, 60, 100, 30])[:, None]).float()
"""Samples of very different numbers of tokens that count."""
PER_TOKEN = "--calculate-per-token-loss"


def one_step(flags: str, micro_batch: int) -> tuple[float, float, float]:
    """(loss, gradient norm, sum of all weights after the step) of a step of eight samples."""
    words = "--fp64 --global-batch-size 8 --clip-grad 0"
    trainer = make_trainer(tiny_config(f"--micro-batch-size {micro_batch} {words} {flags}"))
    rows = [slice(start, start + micro_batch) for start in range(0, 8, micro_batch)]
    batches = [MicroBatch(TOKENS[at, :-1], TOKENS[at, 1:], None if MASK is None else MASK[at]) for at in rows]
    loss = trainer.forward_backward(batches, 0)
    step = trainer.update(loss, iteration=1, samples=8, progress=0, stop=False)
    mean_loss, norm, *_ = step.readings.read()
    weights = trainer.engine.optimizer.state_tensors()["weights"]
    total = sum((part.double() ** 2).sum().item() for tensor in weights.values() for _, part in tensor.parts)
    trainer.close()
    return float(mean_loss), float(norm), total


@cache
def whole() -> tuple[float, float, float]:
    """One micro-batch, whose mean is that of its tokens anyway."""
    return one_step("", 8)


@pytest.mark.parametrize(
    "micro_batch", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_a_step_does_not_depend_on_how_it_is_cut(micro_batch: int) -> None:
    assert one_step(PER_TOKEN, micro_batch) == pytest.approx(whole(), rel=1e-12)
    assert one_step("", micro_batch) != pytest.approx(whole(), rel=1e-5)


def test_a_step_without_a_token_that_counts_is_a_loss_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.run.test_per_token_loss.MASK", torch.zeros_like(MASK))
    loss, norm, _ = one_step(PER_TOKEN, 2)
    assert (loss, norm) == (0.0, 0.0)
