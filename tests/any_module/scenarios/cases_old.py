"""Cases of the scenarios, beside the zoo's."""

from __future__ import annotations

from typing import Any

import torch

from tests.any_module.case import Case, by_name
from tests.any_module.oddities.training import TWO_BACKWARD_CALLS, LossesInside
from tests.any_module.zoo import Mlp

DECAY_OF_RATE = 0.9


class OutOfMemory(RuntimeError):
    """Stands for torch.OutOfMemoryError, or for any exception of the user's code."""


class Raises(Mlp):
    """Fails between its blocks when it is told to."""

    failing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if self.failing:
            raise OutOfMemory
        return self.last(self.blocks[2](self.blocks[1](x)))


class LossInside(LossesInside):
    """Returns its loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, y)[0]


def falling(step: int) -> float:
    return DECAY_OF_RATE**step


def mean_square(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"], batch["y"])


SCENARIOS = by_name(
    [
        Case("raises", Raises),
        Case("loss_inside", LossInside, loss=mean_square),
        Case("falling_rate", Mlp, schedule=falling),
        *TWO_BACKWARD_CALLS,
    ]
)
