"""Four parameter groups that share nothing, and vectors that are updated by them."""

from collections.abc import Sequence

import torch

from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.group_ranges import Family, GroupRange

SEPARATE: tuple[Family, ...] = ((0,), (1,), (2,), (3,))
JOINED: tuple[Family, ...] = ((2,), (0, 1), (3,))
CLIP, SCALE, STEPS, SKIPPED = 1.0, 3.0, 20, 5


def groups_at(step: int) -> tuple[AdamHyperparameters, ...]:
    """Every number differs, and rates change; groups 0 and 1 differ by the decay only."""
    lr = 1e-2 / (1 + step)
    decays = AdamHyperparameters(lr, 0.9, 0.95, 1e-8, 0.1)
    others = (
        AdamHyperparameters(3e-3, 0.8, 0.999, 1e-6, 0.01 * step),
        AdamHyperparameters(2 * lr, 0.95, 0.99, 1e-10, 0.3),
    )
    return decays, decays._replace(weight_decay=0.0), *others


def norm_at(step: int) -> float:
    return float("nan") if step == SKIPPED else (0.5, 3.0)[step % 2]


def flat_after(device: str, families: Sequence[Family], optimizer: ElementwiseOptimizer = ADAMW) -> list[torch.Tensor]:
    """The vectors after all steps: model parameters of two dtypes, and elements that are their own."""
    generator, every = torch.Generator().manual_seed(0), range(0, 1536, 128)
    group_ranges = [GroupRange(low, low + 100, (3, 0, 1, 2)[k % 4]) for k, low in enumerate(every)]

    def normal() -> torch.Tensor:
        """Zero between ranges, as padding is."""
        padded = torch.randn(1536, generator=generator)
        for one in group_ranges:
            padded[one.stop : one.start + 128] = 0
        return padded.to(device)

    weights, grad, steps = normal(), normal(), torch.zeros((), dtype=torch.float64, device=device)
    zeros = {name: torch.zeros_like(weights) for name in optimizer.states}
    state = FlatState({"weights": weights, **zeros}, grad, steps)
    live = [torch.zeros(512, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float16)]
    adam = FlatOptimizer([optimizer] * 4, state, group_ranges, families)
    adam.lay_out([(0, 512, live[0]), (512, 1024, live[1]), (1024, 1536, None)])
    for step in range(STEPS):
        grad.copy_(normal())
        norm = torch.tensor(norm_at(step), dtype=torch.float64, device=device)
        assert adam.step(groups_at(step), norm, SCALE, CLIP)[0].skipped.item() == (step == SKIPPED)
    assert steps.item() == STEPS - 1
    return [vector.cpu() for vector in (*state.vectors.values(), *live)]
