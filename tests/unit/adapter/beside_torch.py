"""Optimizers beside torch's own in fp64: a network, its losses, and what a plain loop makes of it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import gptpar

CLIP = 0.4
GroupsOf = Callable[[Any], Any]
"""A module -> what its optimizer gets: parameters, or groups of them."""


class Lion(torch.optim.Optimizer):
    """As its paper has it: the sign of one mean of gradients, while another is kept."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * torch.sign(beta1 * mean + (1 - beta1) * p.grad))
                mean.mul_(beta2).add_((1 - beta2) * p.grad)


KINDS: dict[str, tuple[str, type, dict[str, Any]]] = {
    "SGD": ("SGD", torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "Nesterov": ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
    "AdamW": ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AMSGrad": ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "AMSGrad, L2": ("Adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "Adagrad": (
        "Adagrad",
        torch.optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "RMSprop": ("RMSprop", torch.optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop, all": (
        "rmsprop",
        torch.optim.RMSprop,
        {"lr": 1e-2, "alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
    ),
    "Lion": ("Lion", Lion, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.3}),
}
"""Name -> (DeepSpeed's type, class, hyperparameters)."""


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step).to(next(model.parameters()).dtype)).square().mean()
    return loss


def in_plain_torch(
    name: str,
    groups_of: GroupsOf,
    steps: int,
    before_step: Callable[[nn.Sequential, int], None] = lambda model, step: None,
) -> list[torch.Tensor]:
    """The parameters after some steps."""
    _, kind, params = KINDS[name]
    model = network()
    optimizer = kind(groups_of(model), **params)
    for step in range(steps):
        before_step(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def make_config(ratio: float, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
        **more,
    }


def engine_of(name: str, ratio: float, groups_of: GroupsOf = nn.Module.parameters, **more: Any) -> Any:
    """An engine of the network that takes over torch's optimizer; ``more``: of the configuration, and ``dtype``."""
    _, kind, params = KINDS[name]
    model = network(more.pop("dtype", torch.float64))
    optimizer = kind(groups_of(model), **params)
    return gptpar.initialize(model=model, config=make_config(ratio, **more), optimizer=optimizer)[0]


def train(engine: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        engine.backward(loss_of(engine, step))
        engine.step()


def assert_close(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], atol: float = 1e-12) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=atol)
