"""Oddities of how a model is trained: passes, losses, groups, schedules, parameters frozen between steps."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from tests.any_module.case import DECAY, LR, Batch, Case, Model, squared_error
from tests.any_module.zoo import Mlp


def two_losses(model: Model, batch: Batch) -> list[torch.Tensor]:
    """Two calls, a backward pass each."""
    return [F.mse_loss(model(batch["x"]), batch["y"]), 0.3 * F.mse_loss(model(batch["y"]), batch["x"])]


def two_losses_of_one_graph(model: Model, batch: Batch) -> list[torch.Tensor]:
    """One call, two backward passes through it."""
    y = model(batch["x"])
    return [F.mse_loss(y, batch["y"]), 0.3 * y.abs().mean()]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; vectors do not, and have another rate."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 2 * DECAY},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": LR / 3},
    ]


def groups_across_blocks(model: nn.Module) -> list[dict[str, Any]]:
    """Rates fall towards the first layer; other betas and another epsilon in one."""
    blocks = list(getattr(model, "blocks"))  # noqa: B009
    ends = [*model.first.parameters(), *model.last.parameters()]  # type: ignore[union-attr,operator]
    groups: list[dict[str, Any]] = [
        {"params": list(block.parameters()), "lr": LR * 0.5**number} for number, block in enumerate(blocks)
    ]
    return [*groups, {"params": ends, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0}]


def triangle(step: int) -> float:
    """Up and down."""
    return min(1 + step, 30 - step) / 15


def compiled_whole() -> nn.Module:
    """The model itself."""
    model = Mlp()
    model.compile(backend="eager")
    return model


class Thresholded(torch.autograd.Function):
    """The identity, whose gradient is zero where it is small: it depends on the gradient's size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.where(grads[0].abs() > 2e-3, grads[0], 0.0)


def clamped() -> nn.Module:
    """The user's hooks clamp gradients: they have to see those of plain torch, whatever the step adds up later."""
    model = Mlp()
    model.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-2e-3, 2e-3))
    model.blocks[1].register_forward_hook(lambda module, inputs, output: Thresholded.apply(output))
    model.blocks[2].register_full_backward_hook(
        lambda module, to_inputs, to_outputs: (to_inputs[0].clamp(-3e-3, 3e-3),)
    )
    return model


FROZEN_IN = {
    "first.weight": {2, 5},
    "blocks.0.up.weight": {0, 1, 2, 4},
    "blocks.1.norm.bias": {1, 2, 3},
    "blocks.2.down.weight": {3, 4, 6, 7},
    "last.bias": {4},
}
"""Parameter -> the steps in which it is frozen. In steps 5 to 7, ``first`` and ``blocks.0`` are frozen as a whole."""


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


TRAINING = [
    Case("two_backward_calls", Mlp, loss=two_losses),
    Case("two_backward_calls_of_one_graph", Mlp, loss=two_losses_of_one_graph, shares_graph=True),
    Case("parameter_groups_across_blocks", Mlp, groups=groups_across_blocks),
    Case("clients_schedule", Mlp, groups=two_groups, client=True, schedule=triangle),
    Case("schedule_of_a_function", Mlp, groups=two_groups, schedule=triangle),
    Case("compiled_whole", compiled_whole),
    Case("users_hooks", clamped),
    Case("frozen_in_turns", Mlp, loss=frozen_in_turns),
    Case("unfrozen_gradually", Mlp, loss=unfrozen_gradually),
]
