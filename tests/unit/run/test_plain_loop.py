"""Training against a plain PyTorch loop on the same batches, however a process divides a step."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from gptpar.data.loader import MicroBatch
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from tests.helpers import make_trainer, random_tokens, tiny_config

STEPS = 50


def plain_loop(config, tokens: list[torch.Tensor]) -> list[float]:  # type: ignore[no-untyped-def]
    """Forward, mean cross entropy, clipping, AdamW, linear warm-up, cosine decay: nothing but torch."""
    trainer = make_trainer(config)
    weights = trainer.engine.optimizer.state_tensors()["weights"]
    model = Stage(gpt_model(config.model).specs)
    model.place({name: parts.parts[0][1].clone() for name, parts in weights.items()})
    named = model.global_parameters()
    decayed = [p for name, p in named.items() if p.dim() > 1]
    others = [p for name, p in named.items() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, batch in enumerate(tokens):
        warm, total = 10, STEPS
        ratio = (step - warm) / (total - warm)
        lr = 1e-2 * step / warm if step <= warm else 1e-3 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-2 - 1e-3)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        logits = model(batch[:, :-1], {"seq_length": 16})
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fifty_steps_follow_a_plain_loop() -> None:
    """Loss by loss to 1e-5 in fp32, where a batch is accumulated from two micro-batches."""
    config = tiny_config(
        f"--train-iters {STEPS} --micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 10 "
        "--lr-decay-style cosine --min-lr 1e-3 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0.5"
    )
    tokens = [random_tokens(4, 16, 60, seed=step) for step in range(STEPS)]
    trainer = make_trainer(config)
    losses, norms = [], []
    for step, batch in enumerate(tokens):
        parts = [MicroBatch(part[:, :-1], part[:, 1:]) for part in batch.split(2)]
        loss = trainer.forward_backward(parts, step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=step * 4, stop=False)
        got, norm, skipped, _ = launched.readings.read()
        assert skipped == 0
        losses.append(got)
        norms.append(norm)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_loop(config, tokens)), rtol=0, atol=1e-5)
    assert sum(norm > 0.5 for norm in norms) > 10, "clipping must have been active"
    assert losses[-1] < losses[0]


# --- --calculate-per-token-loss: tokens that count are weighed alike, however a process divides a step --------------


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
    monkeypatch.setattr("tests.unit.run.test_plain_loop.MASK", torch.zeros_like(MASK))
    loss, norm, _ = one_step(PER_TOKEN, 2)
    assert (loss, norm) == (0.0, 0.0)
