"""DeepSpeed's learning-rate schedules, as torch's: over the ``param_groups`` of the optimizer that is returned.

DeepSpeed's scheduler takes its first step after the optimizer's first. So an optimizer step numbered n = 0, 1, ... has
the initial rate for n = 0, and the formula's value at i = n - 1 afterwards, which for i = 0 is the initial rate again.
Until i reaches N = max(2, ``warmup_num_steps``), the warm-up is at ``i / N`` (linear) or ``log(i + 1) / log(N)`` (log).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gptpar.any_module.options import SchedulerOptions
from gptpar.errors import GptparError

Rates: TypeAlias = float | Sequence[float]
ClientScheduler: TypeAlias = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None


class WarmupLR(LRScheduler):
    """From the lowest rate to the highest, which it keeps.

    Args:
        optimizer: whose groups' rates are set.
        warmup_min_lr: lowest rate of all groups, or of each.
        warmup_max_lr: highest rate of all groups, or of each; default: the first group's rate, for all, as DeepSpeed.
        warmup_num_steps: until the highest rate.
        warmup_type: ``log`` or ``linear``.
        last_epoch: steps done by an optimizer whose state is being resumed; -1: none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ):
        highest: Rates = optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _of_each_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _of_each_group(optimizer, "warmup_max_lr", highest)
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Of each group, in the step that follows."""
        share = self._share(max(0, self.last_epoch - 1))
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self, i: int) -> float:
        """Of the way from the lowest rate to the highest."""
        return _warmed(i, self.warmup_num_steps, self.warmup_type) if i < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """From the lowest rate to the highest, and back to the lowest on a straight line, until ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_epoch)

    def _share(self, i: int) -> float:
        if i < self.warmup_num_steps:
            return super()._share(i)
        return max(0.0, (self.total_num_steps - i) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRScheduler):
    """From a share of each group's own rate to all of it, and down half a cosine to another share.

    As DeepSpeed's, it begins at rate 0 whatever ``warmup_min_ratio`` is, which the second step has, and the cosine is a
    step ahead: the first step after the warm-up is 1 / (``total_num_steps`` - N) of its way down.

    Args:
        optimizer: whose groups' rates are set; those that it has are the highest.
        total_num_steps: until the lowest rate.
        warmup_min_ratio, cos_min_ratio: the shares at the beginning and at the end.
        warmup_num_steps, warmup_type, last_epoch: see :class:`WarmupLR`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ):
        self.total_num_steps, self.warmup_num_steps = total_num_steps, max(2, warmup_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio, self.warmup_type = warmup_min_ratio, cos_min_ratio, warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Of each group, in the step that follows."""
        share = self._share(self.last_epoch - 1)
        return [float(highest) * share for highest in self.base_lrs]

    def _share(self, i: int) -> float:
        """Of each group's highest rate."""
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _warmed(
                i, self.warmup_num_steps, self.warmup_type
            )
        way = min(1.0, (i - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * way)) / 2)


SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
"""By ``scheduler.type``; the arguments are named as DeepSpeed's."""


def scheduler_of(
    client: ClientScheduler, optimizer: torch.optim.Optimizer, options: SchedulerOptions | None
) -> LRScheduler | None:
    """The schedule of the rates, which the engine steps after each of its steps that was not skipped.

    Args:
        client: goes before the configuration's: a scheduler over the optimizer that was passed to
            ``gptpar.initialize``, or a function from the returned optimizer to a scheduler.
        optimizer: the returned one.
        options: the configuration's.

    Raises:
        GptparError: the client's scheduler moves other groups, or cannot be stepped without a metric.
    """
    if client is None:
        return None if options is None else SCHEDULERS[options.type](optimizer, **options.params)
    scheduler = client if isinstance(client, LRScheduler) or not callable(client) else client(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise GptparError(
            f"lr_scheduler is, or returns, what is of type {type(scheduler).__name__}: pass a "
            "torch.optim.lr_scheduler, or a function from an optimizer to one."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise GptparError(
            "lr_scheduler is a ReduceLROnPlateau, whose step needs a metric that the engine has not: build it over the "
            "optimizer that gptpar.initialize returns, and step it yourself."
        )
    _require_groups(scheduler, optimizer)
    return scheduler


def _require_groups(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """The scheduler has to move the groups which the engine reads: an optimizer that was taken over shares them."""
    theirs, ours = scheduler.optimizer.param_groups, optimizer.param_groups
    if [*map(id, theirs)] != [*map(id, ours)]:
        raise GptparError(
            f"lr_scheduler moves the rates of another optimizer ({type(scheduler.optimizer).__name__}) than the one "
            "passed to gptpar.initialize: pass that one, or a function from an optimizer to a scheduler."
        )
    if scheduler.optimizer is not optimizer:
        # The engine steps in its place: torch would warn that the scheduler was stepped before the optimizer.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]


def _of_each_group(optimizer: torch.optim.Optimizer, name: str, rates: Rates) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(rates, Sequence):
        return [float(rates)] * count
    if len(rates) != count:
        raise GptparError(f"{name} has {len(rates)} rate(s) for {count} parameter group(s): give one, or as many.")
    return [float(rate) for rate in rates]


def _warmed(i: int, num_steps: int, kind: str) -> float:
    """The share of the warm-up that is done, 0 at i = 0."""
    return i / num_steps if kind == "linear" else math.log(i + 1) / math.log(num_steps)
