"""Training against a plain PyTorch loop on the same batches, however a process divides a step."""

import math

import pytest
import torch
import torch.nn.functional as F

from gptpar.data.loader import MicroBatch
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from tests.helpers import make_trainer, random_tokens, tiny_config

STEPS = 30


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


def test_thirty_steps_follow_a_plain_loop() -> None:
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


# --- --calculate-per-token-loss: tokens that count are weighed alike, however a process divides a step --------------


def one_step(flags: str, micro_batch: int, mask_BS: torch.Tensor) -> tuple[float, float, float]:
    """(loss, gradient norm, sum of all weights after the step) of a step of eight samples."""
    words = "--fp64 --global-batch-size 8 --clip-grad 0"
    trainer = make_trainer(tiny_config(f"--micro-batch-size {micro_batch} {words} {flags}"))
    parts = zip(random_tokens(8, 16, 60).split(micro_batch), mask_BS.split(micro_batch), strict=True)
    loss = trainer.forward_backward([MicroBatch(part[:, :-1], part[:, 1:], mask) for part, mask in parts], 0)
    step = trainer.update(loss, iteration=1, samples=8, progress=0, stop=False)
    mean_loss, norm, *_ = step.readings.read()
    weights = trainer.engine.optimizer.state_tensors()["weights"]
    total = sum((part.double() ** 2).sum().item() for tensor in weights.values() for _, part in tensor.parts)
    trainer.close()
    return float(mean_loss), float(norm), total


def test_a_loss_per_token_does_not_depend_on_how_a_step_is_cut() -> None:
    """The samples have very different numbers of tokens that count; all of them together, the mean is theirs anyway."""
    shares = torch.tensor([5, 90, 40, 100, 10, 60, 100, 30])
    mask_BS = (random_tokens(8, 15, 100, seed=1) < shares[:, None]).float()
    whole = pytest.approx(one_step("", 8, mask_BS), rel=1e-12)
    assert one_step("--calculate-per-token-loss", 1, mask_BS) == whole
    assert one_step("", 1, mask_BS)[0] != pytest.approx(whole.expected[0], rel=1e-5)
    assert one_step("--calculate-per-token-loss", 2, torch.zeros_like(mask_BS))[:2] == (0.0, 0.0)
