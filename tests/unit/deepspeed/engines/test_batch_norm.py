"""BatchNorm beside 16-bit parameters: statistics as the user has them, against the same module in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gptpar
from gptpar.adapter.units import dtypes_of
from gptpar.deepspeed.engines.engine import ModuleEngine
from tests.pairs import every_pair

OFFLOAD = {"offload_optimizer": {"device": "cpu", "ratio": 0.6}}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())  # noqa: E731
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(block(), block()), nn.Flatten(), nn.Linear(4 * 36, 5))


def initialize(model: Any, precision: str, **more: Any) -> ModuleEngine:
    scale = {"loss_scale": 1.0} if precision == "fp16" else {}
    config = {
        "train_micro_batch_size_per_gpu": 6,
        precision: {"enabled": True, "auto_cast": True, **scale},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        **more,
    }
    return gptpar.initialize(model=model, config=config)[0]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.randint(5, (6,), generator=generator)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]


def as_converted(precision: str, converts_norms: bool) -> nn.Module:
    """In 16 bits, as the user or as the engine does it."""
    model = build().to(HALF[precision])
    for one, original in zip(norms(model), norms(build()), strict=True):
        if not converts_norms:
            one.float().load_state_dict(original.state_dict())
    return model


@every_pair(offload=[{}, OFFLOAD], converted=["", "model", "buffers"], precision=list(HALF))
def test_training(precision: str, converted: str, offload: dict[str, Any]) -> None:
    """Outputs, gradients and statistics of the first step are plain torch's bits; afterwards both stay together.

    ``converted``: what is 16-bit beside the parameters, by the program (``model``) or the configuration (``buffers``).
    """
    plain = as_converted(precision, converts_norms=bool(converted))
    model = build().to(HALF[precision]) if converted == "model" else build()
    types = {"data_types": {"buffer_dtype": precision}} if converted == "buffers" else {}
    engine = initialize(model, precision, zero_optimization={"stage": 1, **offload}, **types)
    given = plain if converted == "model" else build()  # whose values the engine's masters have
    masters = {name: nn.Parameter(p.detach().float()) for name, p in given.named_parameters()}
    adam = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.0)
    for step in range(5):
        x, y = batch(step)
        loss = F.cross_entropy(engine(x).float(), y)
        wanted = F.cross_entropy(plain(x.to(HALF[precision])).float(), y)
        engine.backward(loss)
        plain.zero_grad()
        wanted.backward()
        if step == 0:
            assert torch.equal(loss, wanted)
            for name, p in plain.named_parameters():
                assert p.grad is not None and torch.equal(engine.full_gradient(name).float(), p.grad.float()), name
            assert all(torch.equal(value, statistics(plain)[name]) for name, value in statistics(model).items())
        engine.step()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.float()
        adam.step()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(masters[name])
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-2)
    for name, value in statistics(model).items():
        assert value.dtype == statistics(plain)[name].dtype
        torch.testing.assert_close(value, statistics(plain)[name], rtol=2e-2, atol=1e-3)
    model.eval()
    with torch.no_grad():
        assert engine(batch(9)[0]).dtype == HALF[precision]
    engine.close()


@pytest.mark.parametrize("precision", HALF)
def test_formats(precision: str) -> None:
    """BatchNorm's parameters follow its statistics; without any they are like all others."""
    half, model = HALF[precision], build()
    model.append(nn.BatchNorm1d(5, track_running_stats=False))
    model[1][1][1].to(half)
    engine = initialize(model, precision)
    found = {name: p.dtype for name, p in engine.module.named_parameters()}
    kept = {"1.0.1.weight", "1.0.1.bias"}
    assert found == {name: torch.float32 if name in kept else half for name in found}
    assert model[1][0][1].running_var.dtype == torch.float32 and model[1][1][1].running_var.dtype == half
    engine.close()
    mixed = build().bfloat16()
    norms(mixed)[0].float()
    assert dtypes_of(mixed, None) == {p: p.dtype for p in mixed.parameters()}
