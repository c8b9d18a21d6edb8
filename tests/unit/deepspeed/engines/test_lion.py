"""``gptpar.initialize`` with DeepSpeed's optimizer type Lion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.errors import ConfigError

BETAS, LR, DECAY, STEPS = (0.9, 0.95), 1e-3, 0.3, 4
PARAMS = {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def plain_loop() -> dict[str, torch.Tensor]:
    model = module()
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches():
        model.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                direction = torch.sign(BETAS[0] * momenta[name] + (1 - BETAS[0]) * p.grad)
                p.copy_(p * (1 - LR * DECAY) - LR * direction)
                momenta[name] = BETAS[1] * momenta[name] + (1 - BETAS[1]) * p.grad
    return {name: p.detach() for name, p in model.named_parameters()}


def make(ratio: float) -> TrainingEngine:
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    config = {"train_batch_size": 4, "optimizer": {"type": "Lion", "params": PARAMS}, "zero_optimization": zero}
    engine: TrainingEngine = gptpar.initialize(model=module(), config=config)[0]
    return engine


def take_steps(engine: TrainingEngine, some: list[torch.Tensor]) -> None:
    for batch in some:
        engine.backward(engine(batch).square().mean())
        engine.step()


@pytest.mark.parametrize("ratio", [0.3, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.0, 1.0))])
def test_training_follows_a_plain_loop(tmp_path: Path, ratio: float) -> None:
    """The last step is taken by an engine of another ratio, from the first one's checkpoint."""
    engine, resumed = make(ratio), make(0.6)
    assert engine.optimizer.param_groups[0]["betas"] == BETAS and "eps" not in engine.optimizer.param_groups[0]
    take_steps(engine, batches()[:-1])
    engine.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    take_steps(resumed, batches()[-1:])
    wanted = plain_loop()
    for name, value in resumed.state_dict().items():
        assert torch.allclose(value, wanted[name.removeprefix("module.")], rtol=0, atol=1e-12), name
    engine.close()
    resumed.close()


def test_adam_s_keys_are_refused() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "Lion", "params": {**PARAMS, "eps": 1e-8}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.eps"):
        gptpar.initialize(model=module(), config=config)
