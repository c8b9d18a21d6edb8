"""Flat vectors in stretches, and whether their update follows torch's AdamW."""

from dataclasses import dataclass, replace

import torch

from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.group_ranges import DECAYS, DECAYS_NOT, GroupRange

RATES = [AdamHyperparameters(lr, 0.9, 0.95, 1e-8, 0.1) for lr in (1e-2, 3e-3, 2e-2, 1e-2)]
ENDS = [0, 256, 256 + 128, 1000, 1100]
"""Of the vectors' stretches: the third ends within a block, so that the fourth begins where no block does."""
GROUP_RANGES = [
    *(GroupRange(0, 100, DECAYS), GroupRange(128, 300, DECAYS_NOT), GroupRange(320, 1000, DECAYS)),
    *(GroupRange(1000, 1060, DECAYS_NOT), GroupRange(1064, 1100, DECAYS)),
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
    state = FlatState(dict(zip(ADAMW.vectors, (weights, *moments), strict=True)), grads, steps)
    adam = FlatOptimizer([replace(ADAMW, device_kernel=None) if by_torch else ADAMW] * 2, state, GROUP_RANGES)
    live = torch.zeros(length + 8, dtype=torch.bfloat16, device=device)
    pieces = [live[0:256], live[256:384], None, live[-100:]]
    adam.lay_out([(*ends, piece) for ends, piece in zip(zip(ENDS, ENDS[1:], strict=False), pieces, strict=True)])
    return Case(adam, state, live)


def assert_follows_torch(case: Case, tolerance: float) -> None:
    """Four steps, the third skipped; gradients are divided, and gaps between ranges stay out of it."""
    start = case.state.vectors["weights"].cpu().double()
    leaves = [start[one.start : one.stop].clone().requires_grad_() for one in GROUP_RANGES]
    decays = [0.1 if one.group == DECAYS else 0.0 for one in GROUP_RANGES]
    leaf_groups = [{"params": [leaf], "weight_decay": decay} for leaf, decay in zip(leaves, decays, strict=True)]
    reference = torch.optim.AdamW(leaf_groups, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(1)
    device = case.state.vectors["weights"].device
    for step, rates in enumerate(RATES):
        grad = torch.zeros_like(start)
        for one in GROUP_RANGES:
            grad[one.start : one.stop] = torch.randn(one.stop - one.start, generator=generator, dtype=torch.float64)
        case.state.grad.copy_(grad)
        given = case.state.grad.clone()
        skipped, divisor = step == 2, float("nan") if step == 2 else 3.0
        if not skipped:
            for leaf, one in zip(leaves, GROUP_RANGES, strict=True):
                leaf.grad = given[one.start : one.stop].cpu().double() / divisor
            for group in reference.param_groups:
                group["lr"] = rates.lr
            reference.step()
        norm = torch.tensor(float("inf") if skipped else 1.0, dtype=torch.float64, device=device)
        groups = rates, rates._replace(weight_decay=0.0)
        assert case.adam.step(groups, norm, divisor, 0.0)[0].skipped.item() == skipped
        assert torch.equal(case.state.grad, given)
    assert case.state.steps.item() == 3
    weights, vectors = case.state.vectors["weights"].cpu(), case.state.vectors
    for leaf, one in zip(leaves, GROUP_RANGES, strict=True):
        for name, expected in (("weights", leaf.detach()), *reference.state[leaf].items()):
            if name != "step":
                found = vectors[name][one.start : one.stop].cpu().double()
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    rounded, live = weights.bfloat16(), case.live.cpu()
    for one in GROUP_RANGES:
        if one.stop <= 384:
            assert torch.equal(live[one.start : one.stop], rounded[one.start : one.stop])
        elif one.start >= 1000:
            assert torch.equal(live[8:][one.start : one.stop], rounded[one.start : one.stop])
    assert not live[384:1008].any()


GRADS = ["float32", "bfloat16", "float16"]
