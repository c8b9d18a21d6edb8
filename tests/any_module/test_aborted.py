"""A forward or backward pass that ends in an error leaves nothing behind: the next step is as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gptpar

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1)).double()


def losses(offload: dict[str, Any], abort: str) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **offload},
    }
    engine = gptpar.initialize(model=model(), config=config)[0]
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(5)).double(), []

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for step in range(STEPS):
        if step == 1 and abort:
            hooked = engine.module[2]
            handle = (
                hooked.register_full_backward_hook(stop)
                if abort == "backward"
                else hooked.register_forward_pre_hook(stop)
            )
            with pytest.raises(KeyboardInterrupt):
                engine.backward(engine(x).square().mean())
            handle.remove()
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.close()
    return found


@pytest.mark.parametrize("abort", ["forward", "backward"])
@pytest.mark.parametrize(
    "offload",
    [
        {},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.6}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ],
    ids=["device", "share", "all"],
)
def test_the_next_step_is_as_if_it_had_not_been(offload: dict[str, Any], abort: str) -> None:
    assert losses(offload, abort) == losses(offload, "")


class Piecewise(nn.Module):
    """Uses parts of blocks that it never calls themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block[1](block[0](x).relu())
        return x.square().mean()


def test_blocks_that_are_used_piecewise_have_the_last_steps_values() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    }
    module, plain = Piecewise(), Piecewise()
    engine = gptpar.initialize(model=module, config=config)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5)).double()
    for _ in range(20):
        loss, expected = engine(x), plain(x)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad(set_to_none=False)
        expected.backward()
        optimizer.step()
    engine.close()
