"""DeepSpeed's learning-rate schedules as torch schedulers over the ``param_groups`` of the returned optimizer.

The formulas, with the names and defaults of their parameters, are those of :mod:`gptpar.optim.step_schedules`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gptpar.adapter.options import SchedulerOptions
from gptpar.errors import ArgumentError, GptparError, is_whole
from gptpar.optim.step_schedules import FORMULAS, one_cycle_betas

_COUNTS = {
    "warmup_num_steps": 0,
    "total_num_steps": 0,
    "cycle_first_step_size": 1,
    "cycle_second_step_size": 0,
    "lr_range_test_step_size": 1,
}
"""Parameter that is a number of steps -> its least value."""

ClientScheduler: TypeAlias = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None


class StepScheduler(LRScheduler):
    """A schedule whose learning rate is a formula of the number of steps.

    The formula's parameters are attributes, the first group's if lists give each its own; ``min_lrs`` and ``max_lrs``
    are those of all groups.

    Args:
        optimizer: whose groups' learning rates are set.
        *values: the formula's parameters by position. A rate is one for all parameter groups, or a list with one for
            each.
        **named: the formula's parameters by name.
        last_epoch: steps done by an optimizer whose state is being resumed; -1: none.

    Raises:
        ArgumentError: a parameter has a wrong value, or a list another length than there are groups.
    """

    formula: ClassVar[Callable[..., float]]

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, last_epoch: int = -1, **named: Any):
        bound = inspect.signature(self.formula).bind(0, 0.0, *values, **named)
        bound.apply_defaults()
        params = {name: value for name, value in bound.arguments.items() if name not in ("n", "lr")}
        _require_values(params, inspect.signature(self.formula).parameters)
        self.params_of_groups = _of_each_group(optimizer, params)
        super().__init__(optimizer, last_epoch)

    def __getattr__(self, name: str) -> Any:
        groups = vars(self).get("params_of_groups", [{}])
        if name in groups[0]:
            return groups[0][name]
        rates = [key for key in groups[0] if name in ("min_lrs", "max_lrs") and key.endswith(name[:-1])]
        if not rates:
            raise AttributeError(f"a {type(self).__name__} has no {name!r}")
        given = [params[rates[0]] for params in groups]
        return [lr if rate is None else float(rate) for rate, lr in zip(given, self.base_lrs, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:  # type: ignore[override]
        """Set the learning rates of the next step.

        Args:
            last_batch_iteration: number of the step that was taken last, from 0; default: the one that is due.
        """
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of each group in the next step."""
        rates = zip(self.base_lrs, self.params_of_groups, strict=True)
        return [self.formula(self.last_epoch, float(lr), **params) for lr, params in rates]


class WarmupLR(StepScheduler):
    """From the lowest rate to the highest, which stays; default: each group's own rate, as in DeepSpeed 0.19.8."""

    formula = staticmethod(FORMULAS["WarmupLR"])


class WarmupDecayLR(StepScheduler):
    """From the lowest rate to the highest, and back to the lowest on a straight line, until ``total_num_steps``."""

    formula = staticmethod(FORMULAS["WarmupDecayLR"])


class WarmupCosineLR(StepScheduler):
    """From a fraction of each group's own rate to all of it, then down half a cosine to another fraction."""

    formula = staticmethod(FORMULAS["WarmupCosineLR"])

    def get_lr_ratio(self) -> float:
        """The present fraction of each group's own rate; the first group's, if lists give each its own schedule."""
        return self.formula(self.last_epoch, 1.0, **self.params_of_groups[0])


class LRRangeTest(StepScheduler):
    """A rate that grows without end, to find the one at which training diverges."""

    formula = staticmethod(FORMULAS["LRRangeTest"])


class OneCycle(StepScheduler):
    """One cycle of the rate, up and down; the first beta moves the other way unless ``cycle_momentum`` is false."""

    formula = staticmethod(FORMULAS["OneCycle"])

    @property
    def step_ratio(self) -> float:
        """The fraction of a cycle's steps in which the rate grows."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return first / (first + (first if second is None else second))

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the learning rates and betas of the next step."""
        super().step(last_batch_iteration)
        for group, params in zip(self.optimizer.param_groups, self.params_of_groups, strict=True):
            if "betas" in group and (betas := one_cycle_betas(self.last_epoch, **params)) is not None:
                group["betas"] = betas

    def get_mom(self) -> list[tuple[float, float]]:
        """The cycle's betas of each group; before the first step the highest, while groups have the lowest, as in
        DeepSpeed."""
        n, all_params = self.last_epoch, self.params_of_groups
        betas = (one_cycle_betas(n, **params) for params in all_params)
        return [
            (params["cycle_max_mom"] if n == 0 else now[0], now[1])
            for params, now in zip(all_params, betas, strict=True)
            if now is not None
        ]


SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""``scheduler.type`` -> its class, whose arguments have DeepSpeed's names."""


def scheduler_of(
    client: ClientScheduler, optimizer: torch.optim.Optimizer, options: SchedulerOptions | None
) -> LRScheduler | None:
    """The learning-rate scheduler, which the engine steps after each of its steps that was not skipped.

    Args:
        client: a scheduler over the optimizer that was passed to ``gptpar.initialize``, or a function from the
            returned optimizer to one; it precedes the configuration's.
        optimizer: the returned one.
        options: the configuration's.

    Raises:
        GptparError: the client's scheduler changes other groups, or needs a metric at each step.
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
            "lr_scheduler is a ReduceLROnPlateau, whose step needs a metric that the engine does not have: build it "
            "over the optimizer that gptpar.initialize returns, and step it yourself."
        )
    _require_groups(scheduler, optimizer)
    return scheduler


def _require_groups(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """Check that the scheduler changes the groups that the engine reads; an optimizer that was taken over has these."""
    theirs, ours = scheduler.optimizer.param_groups, optimizer.param_groups
    if [*map(id, theirs)] != [*map(id, ours)]:
        raise GptparError(
            f"lr_scheduler changes the rates of another optimizer ({type(scheduler.optimizer).__name__}) than the one "
            "passed to gptpar.initialize: pass that one, or a function from an optimizer to a scheduler."
        )
    if scheduler.optimizer is not optimizer:
        # The engine steps instead of this optimizer; torch would warn that the scheduler was stepped before it.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]


def _require_values(params: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    for name in params.keys() & _COUNTS.keys():
        value, least = params[name], _COUNTS[name]
        is_default = value is None and known[name].default is None
        if not is_default and not (is_whole(value) and value >= least):
            raise ArgumentError(f"{name} is {value!r}: give a whole number of steps, {least} or more.")
    kind = params.get("warmup_type", "log")
    if kind not in ("log", "linear"):
        raise ArgumentError(f"warmup_type is {kind!r}: give 'log' or 'linear'.")


def _of_each_group(optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each group's parameters: a list holds one value for each group."""
    count = len(optimizer.param_groups)
    groups: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in params.items():
        values = value if isinstance(value, list | tuple) else [value] * count
        if len(values) != count:
            raise ArgumentError(
                f"{name} has {len(values)} rate(s) for {count} parameter group(s): give one, or as many."
            )
        for group, own in zip(groups, values, strict=True):
            group[name] = own
    return groups
