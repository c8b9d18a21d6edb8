"""Muon of ``gptpar.initialize`` on two processes: each ZeRO stage, at several ratios, as torch's on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gptpar
from tests.spawn import spawn

LR, ADAM_LR, DECAY, CLIP, EPS = 0.02, 1e-3, 0.1, 0.4, 1e-6
CASES = [(0, 0.3), (1, 0.0), (1, 1.0), (2, 0.3), (3, 0.0), (3, 0.6)]
"""(ZeRO stage, ratio) of an engine that takes one step, from the checkpoint of the one before."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(step: int) -> Tensor:
    """[4, 6] of a step, two of them for each process."""
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def run_all(rank: int, folder: Path) -> list[list[Tensor]]:
    found = []
    for number, (stage, ratio) in enumerate(CASES):
        params = {"lr": LR, "adam_lr": ADAM_LR, "weight_decay": DECAY, "eps": EPS}
        config = {
            "train_batch_size": 4,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "Muon", "params": params},
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
        }
        engine = gptpar.initialize(model=network(), config=config)[0]
        if number:
            engine.load_checkpoint(folder)
        engine.backward(engine(samples(number)[2 * rank : 2 * rank + 2]).square().mean())
        engine.step()
        engine.save_checkpoint(folder)
        engine.close()
        found.append([p.detach().clone() for p in engine.module.parameters()])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Tensor]]:
    both = spawn(run_all, 2, tmp_path_factory.mktemp("muon"), timeout_s=300)
    assert all(torch.equal(a, b) for ours, theirs in zip(*both, strict=True) for a, b in zip(ours, theirs, strict=True))
    return both[0]


@pytest.fixture(scope="module")
def wanted() -> list[list[Tensor]]:
    """The parameters after each step in plain torch, whose Muon does not cast to bf16."""
    model = network()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY)
    biases = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(biases, lr=ADAM_LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY)
    after = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.clone)
        for step in range(len(CASES)):
            model.zero_grad()
            model(samples(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            muon.step()
            adam.step()
            after.append([p.detach().clone() for p in model.parameters()])
    return after


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"ZeRO-{stage}, {ratio}" for stage, ratio in CASES])
def test_two_processes_train_as_torch_does(found: list[list[Tensor]], wanted: list[list[Tensor]], number: int) -> None:
    for got, want in zip(found[number], wanted[number], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
