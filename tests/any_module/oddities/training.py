"""Oddities of how a model is trained: several passes, several losses, groups, schedules, compilation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.any_module.case import DECAY, LR, Batch, Case, Model
from tests.any_module.oddities.flow import MlpOf
from tests.any_module.zoo import Block, Mlp


def two_forwards(model: Model, batch: Batch) -> torch.Tensor:
    """One backward pass over the sum of two calls' losses."""
    return F.mse_loss(model(batch["x"]), batch["y"]) + 0.3 * F.mse_loss(model(batch["y"]), batch["x"])


def two_losses(model: Model, batch: Batch) -> list[torch.Tensor]:
    """Two calls, a backward pass each."""
    return [F.mse_loss(model(batch["x"]), batch["y"]), 0.3 * F.mse_loss(model(batch["y"]), batch["x"])]


def two_losses_of_one_graph(model: Model, batch: Batch) -> list[torch.Tensor]:
    """One call, two backward passes through it."""
    y = model(batch["x"])
    return [F.mse_loss(y, batch["y"]), 0.3 * y.abs().mean()]


class LossesInside(Mlp):
    """Returns its losses, as a list."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return [F.mse_loss(out, y), out.square().mean()]


def sum_of_losses(model: Model, batch: Batch) -> torch.Tensor:
    first, second = model(batch["x"], batch["y"])
    return first + 0.1 * second


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


def compiled_before() -> nn.Module:
    """Each block, before the engine sees it."""
    model = Mlp()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def compile_after(model: nn.Module) -> None:
    """Each block, when the engine is there."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(backend="eager")


def compiled_whole() -> nn.Module:
    """The model itself."""
    model = Mlp()
    model.compile(backend="eager")
    return model


def hooked() -> nn.Module:
    """The user changes gradients by hooks of tensors and modules."""
    model = Mlp()
    model.blocks[0].up.weight.register_hook(lambda grad: 0.5 * grad)
    model.blocks[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    model.blocks[2].register_full_backward_hook(lambda module, to_inputs, to_outputs: (to_inputs[0].clamp(-0.1, 0.1),))
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


TRAINING = [
    Case("two_forwards_before_one_backward", Mlp, loss=two_forwards),
    Case("two_backward_calls", Mlp, loss=two_losses),
    Case("two_backward_calls_of_one_graph", Mlp, loss=two_losses_of_one_graph, shares_graph=True),
    Case("several_losses", LossesInside, loss=sum_of_losses),
    Case("parameter_groups", Mlp, groups=two_groups),
    Case("parameter_groups_across_blocks", Mlp, groups=groups_across_blocks),
    Case("clients_optimizer", Mlp, groups=two_groups, client=True),
    Case("clients_schedule", Mlp, groups=two_groups, client=True, schedule=triangle),
    Case("schedule_of_a_function", Mlp, schedule=triangle),
    Case("compiled_before", compiled_before),
    Case("compiled_after", MlpOf, prepare=compile_after),
    Case("compiled_whole", compiled_whole),
    Case("users_hooks", hooked),
    Case("hooks_that_clamp", clamped),
]
