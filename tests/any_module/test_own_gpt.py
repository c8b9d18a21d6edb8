"""Our own GPT as a stranger's module: what the trainer gives, bit by bit where the sums have the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gptpar.config import Config
from gptpar.data.loader import MicroBatch
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from tests.any_module.case import BETAS, DECAY, EPS, LR, SAMPLES, Setup
from tests.any_module.harness import GPTPAR, initializer
from tests.any_module.matrix import Bench
from tests.any_module.reference import Named
from tests.helpers import make_trainer, random_tokens, tiny_config

LENGTH = 16
FLAGS = f"--fp64 --lr {LR} --lr-decay-style constant --weight-decay {DECAY} --adam-beta1 {BETAS[0]} "
FLAGS += f"--adam-beta2 {BETAS[1]} --adam-eps {EPS} --micro-batch-size {SAMPLES} --softmax-over-padding"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --num-query-groups 2 --disable-bias-linear "
LLAMA += "--untie-embeddings-and-output-weights"


class Gpt(nn.Module):
    """Layers, called with tokens and labels, return the mean loss."""

    def __init__(self, config: Config, weights: Named):
        super().__init__()
        self.stage = Stage(gpt_model(config.model).specs)
        self.stage.place({name: value.clone() for name, value in weights.items()})

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.stage(tokens, {"labels": labels, "seq_length": LENGTH})


def config_of(flags: str, setup: Setup) -> Config:
    batch = SAMPLES * setup.world * setup.accumulation
    return tiny_config(f"{FLAGS} {flags} --clip-grad {setup.clip} --global-batch-size {batch}")


def micro_batches(setup: Setup, step: int) -> list[MicroBatch]:
    """Of all ranks."""
    count = setup.world * setup.accumulation
    tokens = random_tokens(SAMPLES * count, LENGTH, 60, seed=step)
    return [MicroBatch(part[:, :-1], part[:, 1:]) for part in tokens.split(SAMPLES)]


def weights_of_trainer(trainer: Any) -> Named:
    parts = trainer.engine.optimizer.state_tensors()["weights"]
    return {name: one.parts[0][1].clone() for name, one in parts.items()}


def by_trainer(rank: int, flags: str, setup: Setup) -> tuple[Named, list[float], Named]:
    """(initial weights, losses, last weights) of the GPT trainer in one process, with as many threads as the engine."""
    trainer = make_trainer(config_of(flags, setup))
    first, losses = weights_of_trainer(trainer), []
    for step in range(setup.steps):
        loss = trainer.forward_backward(micro_batches(setup, step), step)
        launched = trainer.update(loss, iteration=step + 1, samples=1, progress=step, stop=False)
        losses.append(launched.readings.read()[0])
    return first, losses, weights_of_trainer(trainer)


def as_stranger(rank: int, flags: str, setup: Setup, first: Named) -> tuple[float, Named]:
    """(mean of this rank's last losses, last weights by the trainer's names) of the engine for any module."""
    model = Gpt(config_of(flags, setup), first)
    named = model.stage.global_parameters()
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    zero: dict[str, Any] = {"stage": setup.stage}
    if setup.ratio:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": setup.ratio}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": setup.accumulation,
        "gradient_clipping": setup.clip,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
    }
    engine, *_ = initializer(GPTPAR)(model=model, model_parameters=groups, config=config)
    last = 0.0
    for step in range(setup.steps):
        losses = []
        for micro in range(setup.accumulation):
            batch = micro_batches(setup, step)[micro * setup.world + rank]
            loss = engine(batch.tokens_BS, batch.labels_BS)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        last = sum(losses) / len(losses)
    with engine.gathered():
        weights = {name: p.detach().clone() for name, p in named.items()}
    engine.close()
    return last, weights


@pytest.mark.parametrize(
    ("flags", "setup"),
    [(LLAMA, Setup(1, 0, clip=0.0)), ("", Setup(1, 3, 0.6, clip=0.0)), (LLAMA, Setup(1, 2, 1.0, 2, clip=0.0))],
    ids=["llama, ZeRO-0", "gpt, ZeRO-3, CPU 0.6", "llama, ZeRO-2, CPU 1"],
)
def test_the_trainers_bits(bench: Bench, flags: str, setup: Setup) -> None:
    """Without clipping: the norm's order of summation follows the units, which are cut otherwise."""
    ((first, losses, wanted),) = bench.on_ranks(1, by_trainer, flags, setup)
    ((last, got),) = bench.on_ranks(1, as_stranger, flags, setup, first)
    assert last == losses[-1]
    assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []


@pytest.mark.parametrize(
    ("flags", "setup"),
    [("", Setup(1, 3, 1.0, 2)), (LLAMA, Setup(2, 3, 0.6)), ("", Setup(2, 1, 0.0, 2))],
    ids=["gpt, CPU 1", "llama, two ranks, ZeRO-3, CPU 0.6", "gpt, two ranks, ZeRO-1"],
)
def test_the_trainers_numbers(bench: Bench, flags: str, setup: Setup) -> None:
    """With clipping, and on several processes: the same up to the order of sums."""
    ((first, losses, wanted),) = bench.on_ranks(1, by_trainer, flags, setup)
    found = bench.on_ranks(setup.world, as_stranger, flags, setup, first)
    assert sum(last for last, _ in found) / setup.world == pytest.approx(losses[-1], rel=1e-12)
    for _, got in found:
        for name, value in wanted.items():
            deviation = (got[name] - value).abs().max() / value.abs().max()
            assert deviation <= 1e-12, (name, deviation)
