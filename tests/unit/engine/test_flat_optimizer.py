"""AdamW over flat vectors: every way of computing it against torch's AdamW, whatever the stretches it is cut into."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from gptpar.engine import flat_optimizer
from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.spans import DECAYS, DECAYS_NOT, GroupSpan

RATES = [AdamHyperparameters(lr, 0.9, 0.95, 1e-8, 0.1) for lr in (1e-2, 3e-3, 2e-2, 1e-2)]
ENDS = [0, 256, 256 + 128, 1000, 1100]
"""Of the vectors' stretches: the third ends within a block, so that the fourth begins where no block does."""
SPANS = [
    *(GroupSpan(0, 100, DECAYS), GroupSpan(128, 300, DECAYS_NOT), GroupSpan(320, 1000, DECAYS)),
    *(GroupSpan(1000, 1060, DECAYS_NOT), GroupSpan(1064, 1100, DECAYS)),
]


@dataclass
class Case:
    """An optimizer and the vectors that it updates."""

    adam: FlatOptimizer
    state: FlatState
    live: torch.Tensor


def make(device: str = "cpu", grad: str = "float32", wide: str = "float32", *, by_torch: bool = False) -> Case:
    """By torch's kernel, or by what the device has.

    The first two stretches' live parameters lie together, the third has none, the fourth's are elsewhere.
    """
    length, dtype = ENDS[-1], getattr(torch, wide)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype).to(device)
    moments = [torch.zeros_like(weights) for _ in range(2)]
    grads = torch.zeros(length, dtype=getattr(torch, grad), device=device)
    steps = torch.zeros((), dtype=torch.float64, device=device)
    state = FlatState((weights, *moments), grads, steps)
    adam = FlatOptimizer(replace(ADAMW, device_kernel=None) if by_torch else ADAMW, state, SPANS)
    live = torch.zeros(length + 8, dtype=torch.bfloat16, device=device)
    pieces = [live[0:256], live[256:384], None, live[-100:]]
    adam.lay_out([(*ends, piece) for ends, piece in zip(zip(ENDS, ENDS[1:], strict=False), pieces, strict=True)])
    return Case(adam, state, live)


def follows_torch(case: Case, tolerance: float) -> None:
    """Four steps, the third skipped; gradients are divided, and gaps between spans stay out of it."""
    start = case.state.vectors[0].cpu().double()
    leaves = [start[span.start : span.stop].clone().requires_grad_() for span in SPANS]
    decays = [0.1 if span.group == DECAYS else 0.0 for span in SPANS]
    leaf_groups = [{"params": [leaf], "weight_decay": decay} for leaf, decay in zip(leaves, decays, strict=True)]
    reference = torch.optim.AdamW(leaf_groups, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(1)
    device = case.state.vectors[0].device
    for step, rates in enumerate(RATES):
        grad = torch.zeros_like(start)
        for span in SPANS:
            grad[span.start : span.stop] = torch.randn(span.stop - span.start, generator=generator, dtype=torch.float64)
        case.state.grad.copy_(grad)
        given = case.state.grad.clone()
        skipped, divisor = step == 2, float("nan") if step == 2 else 3.0
        if not skipped:
            for leaf, span in zip(leaves, SPANS, strict=True):
                leaf.grad = given[span.start : span.stop].cpu().double() / divisor
            for group in reference.param_groups:
                group["lr"] = rates.lr
            reference.step()
        norm = torch.tensor(float("inf") if skipped else 1.0, dtype=torch.float64, device=device)
        groups = rates, rates._replace(weight_decay=0.0)
        assert case.adam.step(groups, norm, divisor, 0.0).item() == skipped
        assert torch.equal(case.state.grad, given)
    assert case.state.steps.item() == 3
    weights = case.state.vectors[0].cpu()
    for leaf, span in zip(leaves, SPANS, strict=True):
        for name, expected in (("weights", leaf.detach()), *reference.state[leaf].items()):
            if name != "step":
                found = (
                    dict(zip(ADAMW.vectors, case.state.vectors, strict=True))[name][span.start : span.stop]
                    .cpu()
                    .double()
                )
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    rounded, live = weights.bfloat16(), case.live.cpu()
    for span in SPANS:
        if span.stop <= 384:
            assert torch.equal(live[span.start : span.stop], rounded[span.start : span.stop])
        elif span.start >= 1000:
            assert torch.equal(live[8:][span.start : span.stop], rounded[span.start : span.stop])
    assert not live[384:1008].any()


GRADS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("way", ["kernel", "without a compiler", "by operators"])
@pytest.mark.parametrize("grad", GRADS)
def test_it_is_torchs_adamw(way: str, grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "kernel":
        monkeypatch.setattr("gptpar.optim.cpu_adam._library", lambda: None)
    follows_torch(make(grad=grad, by_torch=way == "by operators"), 1e-5)


@pytest.mark.parametrize("by_torch", [False, True])
def test_double_precision_is_kept(by_torch: bool) -> None:
    follows_torch(make(grad="float64", wide="float64", by_torch=by_torch), 1e-13)


def test_neighbours_are_updated_together() -> None:
    """As far as their live parameters lie behind each other, and blocks begin where they did."""
    memory, other = torch.zeros(512), torch.zeros(512)
    narrow = memory.view(torch.bfloat16)[256:512]  # the places of memory[128:256]
    whole = flat_optimizer._joined([(0, 128, memory[:128]), (128, 128, memory[128:128]), (128, 500, memory[128:500])])
    ((start, stop, live),) = whole
    assert (start, stop) == (0, 500) and live is not None
    assert live.data_ptr() == memory.data_ptr() and len(live) == 500
    for apart in (
        [(0, 128, memory[:128]), (128, 256, other[128:256])],
        [(0, 128, memory[:128]), (128, 256, memory[192:320])],
        [(0, 128, None), (128, 256, memory[128:256])],
        [(0, 128, memory[:128]), (128, 384, narrow)],
        [(0, 100, memory[:100]), (100, 200, memory[100:200])],  # no multiple of a block
        [(0, 128, memory[:128]), (192, 256, memory[128:192])],
    ):
        assert flat_optimizer._joined(apart) == apart
    assert flat_optimizer._joined([(0, 64, None), (64, 100, None)]) == [(0, 100, None)]
