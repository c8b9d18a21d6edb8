"""TwinFlowAdamW on a GPU against torch's AdamW there."""

import pytest
import torch
from torch import nn

from gptpar import TwinFlowAdamW

pytestmark = pytest.mark.gpu

WIDTH, STEPS = 256, 12


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to("cuda", dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, attached: bool, max_norm: float) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        p = next(model.parameters())
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(p.device, p.dtype)
        loss = model(x).square().mean()
        if attached:
            with optimizer.last_backward():  # type: ignore[attr-defined]
                loss.backward()
        else:
            loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_gpu_has_torchs_numbers(dtype: torch.dtype, tolerance: float, ratio: float, attached: bool) -> None:
    plain, ours = make_model(dtype), make_model(dtype)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), False, 0.1)
    with TwinFlowAdamW(ours.parameters(), lr=1e-3, offload_ratio=ratio, max_norm=0.1, speculation="on") as optimizer:
        if attached:
            optimizer.attach(ours)
        train(ours, optimizer, attached, 0.0)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_attached_changes_no_bit_of_bf16(ratio: float) -> None:
    models = [make_model(torch.bfloat16), make_model(torch.bfloat16)]
    for model, attached in zip(models, (False, True), strict=True):
        with TwinFlowAdamW(model.parameters(), offload_ratio=ratio, max_norm=0.1, speculation="on") as optimizer:
            if attached:
                optimizer.attach(model)
            train(model, optimizer, attached, 0.0)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
