"""An engine in plain torch with the verbs of ``gptpar.initialize``, to test the harness on.

It gives what the references give, by other means: hooks instead of ``.grad``, a sum over processes. Planted mistakes
(:data:`MISTAKES`) are what a flat engine is likely to do wrong; the harness has to see each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MISTAKES = {
    "last_gradient_wins": "a second gradient of a parameter in one backward pass replaces the first",
    "lost_micro_batch": "the last micro-batch alone counts",
    "not_divided": "the loss is not divided by the number of micro-batches",
    "not_averaged": "the sum over processes is not divided",
    "not_reduced": "each process keeps its own gradient",
    "not_clipped": "the gradient is not clipped",
    "unused_skipped": "parameters without gradient do not decay",
    "decay_by_shape": "vectors do not decay, whatever the user's groups say",
    "late_rate": "the rate of the step before is used",
    "stale_rank": "the last process misses the fifth update",
    "buffers_lost": "buffers stay as they were",
    "step_count": "the bias correction starts at the second step",
    "rounded": "gradients pass through fp32",
    "moments_forgotten": "a loaded checkpoint brings weights alone",
}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: Any = None,
    *,
    mistake: str = "",
) -> tuple[PlainEngine, torch.optim.Optimizer, Any, Any]:
    """As ``gptpar.initialize``, without data loaders."""
    assert model is not None and config is not None
    if optimizer is None:
        params = config["optimizer"]["params"]
        trainable = model_parameters if model_parameters is not None else model.parameters()
        optimizer = torch.optim.AdamW(trainable, **{**params, "betas": tuple(params["betas"])})
    if callable(lr_scheduler):
        lr_scheduler = lr_scheduler(optimizer)
    return PlainEngine(model, optimizer, lr_scheduler, config, mistake), optimizer, None, lr_scheduler


def with_mistake(mistake: str) -> Callable[..., Any]:
    """:func:`initialize` of an engine with that mistake."""
    assert mistake in MISTAKES

    def make(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs, mistake=mistake)

    return make


class PlainEngine(nn.Module):
    """See the module's docstring."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any], mistake: str = ""):
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler, self.config = model, optimizer, scheduler, config
        self._mistake, self._norm, self._micro, self._steps = mistake, 0.0, 0, 0
        self._final: dict[nn.Parameter, Tensor] | None = None
        self._world, self._rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums = {p: torch.zeros_like(p) for p in self._named.values()}
        self._used: set[nn.Parameter] = set()
        self._buffers_at_start = {name: b.clone() for name, b in model.named_buffers()}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self._named.values()]
        self._plant()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if self._mistake == "last_gradient_wins" and parameter in self._used:
            self._sums[parameter].zero_()
        if self._mistake == "lost_micro_batch" and parameter not in self._used and self._micro:
            self._sums[parameter].zero_()
        self._used.add(parameter)
        assert parameter.grad is not None
        self._sums[parameter] += parameter.grad.float() if self._mistake == "rounded" else parameter.grad
        parameter.grad = None

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        divisor = 1 if self._mistake == "not_divided" else self.config["gradient_accumulation_steps"]
        (loss / divisor).backward(retain_graph=retain_graph)
        if self.is_gradient_accumulation_boundary():
            self._final = None

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._micro == self.config["gradient_accumulation_steps"] - 1

    def _reduce(self) -> dict[nn.Parameter, Tensor]:
        if self._final is None:
            self._final = {p: total.clone() for p, total in self._sums.items()}
            if self._world > 1 and self._mistake != "not_reduced":
                for total in self._final.values():
                    dist.all_reduce(total)
                    total /= 1 if self._mistake == "not_averaged" else self._world
        return self._final

    def full_gradient(self, name: str) -> Tensor:
        return self._reduce()[self._named[name]]

    @torch.no_grad()
    def step(self) -> None:
        if not self.is_gradient_accumulation_boundary():
            self._micro += 1
            self._used.clear()
            return
        if self._final is None and not self._used:
            raise RuntimeError("step() without backward()")
        gradients = self._reduce()
        self._norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        clip = self.config["gradient_clipping"]
        factor = min(1.0, clip / (self._norm + 1e-6)) if clip and self._mistake != "not_clipped" else 1.0
        for p, gradient in gradients.items():
            skipped = self._mistake == "unused_skipped" and p not in self._used
            p.grad = None if skipped else gradient * factor
        before = {p: p.clone() for p in gradients}
        self.optimizer.step()
        if self._mistake == "stale_rank" and self._rank == self._world - 1 and self._steps == 4:
            for p, value in before.items():
                p.copy_(value)
        if self._mistake == "buffers_lost":
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._buffers_at_start[name])
        if self.lr_scheduler is not None and not (self._mistake == "late_rate" and self._steps == 0):
            self.lr_scheduler.step()
        for p, total in self._sums.items():
            p.grad = None
            total.zero_()
        self._used.clear()
        self._final = None
        self._micro, self._steps = 0, self._steps + 1

    def _plant(self) -> None:
        if self._mistake == "decay_by_shape":
            (group,) = self.optimizer.param_groups
            vectors = [p for p in group["params"] if p.dim() < 2]
            group["params"] = [p for p in group["params"] if p.dim() >= 2]
            self.optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})
        if self._mistake == "step_count":
            for p in self._named.values():
                zeros = {kind: torch.zeros_like(p) for kind in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.tensor(1.0), **zeros}

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def get_global_grad_norm(self) -> float:
        return self._norm

    @contextmanager
    def gathered(self, *modules: Any) -> Iterator[None]:
        yield

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        with torch.no_grad():
            losses = [self.module(*next(data_iter)) for _ in range(self.config["gradient_accumulation_steps"])]
        return torch.stack(losses).mean()

    def train_batch(self, data_iter: Iterator[Any]) -> Tensor:
        losses = []
        for _ in range(self.config["gradient_accumulation_steps"]):
            loss = self(*next(data_iter))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def save_checkpoint(self, folder: Any, tag: str = "step", client_state: Any = None) -> None:
        if self._rank == 0:
            os.makedirs(folder, exist_ok=True)
            scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "scheduler": scheduler, "client": client_state or {}}, f"{folder}/{tag}.pt")
            Path(folder, "latest").write_text(tag)
        if self._world > 1:
            dist.barrier()

    def load_checkpoint(self, folder: Any, tag: str | None = None) -> tuple[str | None, Any]:
        if tag is None and not Path(folder, "latest").exists():
            return None, {}
        path = f"{folder}/{tag or Path(folder, 'latest').read_text()}.pt"
        state = torch.load(path)
        self.module.load_state_dict(state["model"])
        if self._mistake != "moments_forgotten":
            self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["scheduler"])
        return path, state["client"]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
