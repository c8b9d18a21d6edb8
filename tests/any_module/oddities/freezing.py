"""Parameters that are frozen and trained again between steps."""

from typing import cast

import torch
from torch import nn

from tests.any_module.case import Batch, Case, Model, squared_error
from tests.any_module.zoo import Mlp

FROZEN_IN = {
    "first.weight": {2, 5},
    "blocks.0.up.weight": {0, 1, 2, 4},
    "blocks.1.norm.bias": {1, 2, 3},
    "blocks.2.down.weight": {3, 4, 6, 7},
    "last.bias": {4},
}
"""Parameter -> steps in which it is frozen; a gradient never reaches the first layers in steps 5 to 7."""


def frozen_in_turns(model: Model, batch: Batch) -> torch.Tensor:
    """Single parameters are frozen in some steps, and a whole block in others."""
    step = batch["step"]
    for name, parameter in cast(nn.Module, model).named_parameters():
        name = name.removeprefix("module.")
        beginning = name.startswith(("first", "blocks.0")) and 5 <= step < 8
        parameter.requires_grad_(not (beginning or step in FROZEN_IN.get(name, ())))
    return squared_error(model, batch)


def unfrozen_gradually(model: Model, batch: Batch) -> torch.Tensor:
    """The last layers are trained first; another block joins them every second step."""
    trained = ("last", *(f"blocks.{number}" for number in range(2, 2 - (batch["step"] + 1) // 2, -1)))
    for name, parameter in cast(nn.Module, model).named_parameters():
        parameter.requires_grad_(name.removeprefix("module.").startswith(trained))
    return squared_error(model, batch)


FREEZING = (
    Case("frozen_in_turns", Mlp, loss=frozen_in_turns),
    Case("unfrozen_gradually", Mlp, loss=unfrozen_gradually),
)
