"""DeepSpeed's learning-rate schedules as pure functions of the number of steps taken.

A formula takes ``n``, the optimizer steps so far (skipped steps do not count), ``lr``, the rate that the optimizer was
given, and DeepSpeed's parameters with their names and defaults. It returns the rate of the step that follows. DeepSpeed
steps its scheduler after its optimizer, so step n + 1 uses DeepSpeed's formula at ``i = n - 1``. Linear warm-ups begin
with two steps at the lowest rate. Source: deepspeed/runtime/lr_schedules.py, DeepSpeed 0.19.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any


def warmup_lr(
    n: int,
    lr: float,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> float:
    """The rate grows from the lowest to the highest (default: ``lr``) and stays there."""
    highest = lr if warmup_max_lr is None else warmup_max_lr
    steps = max(2, warmup_num_steps)
    i = max(0, n - 1)
    return warmup_min_lr + (highest - warmup_min_lr) * (_warmed(i, steps, warmup_type) if i < steps else 1.0)


def warmup_decay_lr(
    n: int,
    lr: float,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> float:
    """The rate grows from the lowest to the highest, and falls back on a straight line until ``total_num_steps``."""
    steps, i = max(2, warmup_num_steps), max(0, n - 1)
    if i < steps:
        share = _warmed(i, steps, warmup_type)
    else:
        share = max(0.0, (total_num_steps - i) / max(1, total_num_steps - steps))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def warmup_cosine_lr(
    n: int,
    lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: str = "log",
) -> float:
    """The rate grows from a share of ``lr`` to ``lr``, and falls along half a cosine to another share.

    The first step has rate 0 for any ``warmup_min_ratio``. The cosine is one step ahead: the first step after the
    warm-up is already 1 / (``total_num_steps`` - warm-up) of the way down.
    """
    steps, i = max(2, warmup_num_steps), n - 1
    if i < 0:
        return 0.0
    if i < steps:
        return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * _warmed(i, steps, warmup_type))
    way = min(1.0, (i - steps + 1) / max(1, total_num_steps - steps))
    return lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * way)) / 2)


def one_cycle(
    n: int,
    lr: float,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> tuple[float, tuple[float, float] | None]:
    """(the rate of a step, both betas), the latter ``None`` if the optimizer's betas stay.

    The rate grows in a cycle's first part and falls in its second, in stairs if there are any; then it decays. The
    first beta falls while the rate grows; only the first step has the lowest one, as in DeepSpeed.
    """
    second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
    total = cycle_first_step_size + second
    rate, beta = cycle_min_lr, cycle_max_mom
    if n <= total:
        stairs = cycle_first_stair_count, cycle_second_stair_count
        height = _height(n, cycle_first_step_size, second, stairs)
        rate += (cycle_max_lr - cycle_min_lr) * height
        beta = beta - (cycle_max_mom - cycle_min_mom) * height if n else cycle_min_mom
    elif decay_step_size:
        rate = rate / (1 + decay_lr_rate * (n - total) / decay_step_size) if decay_lr_rate else rate
        beta *= 1 + decay_mom_rate * (n - total) / decay_step_size
    return rate, (beta, 0.99) if cycle_momentum else None


@functools.wraps(one_cycle)
def one_cycle_lr(*values: Any, **named: Any) -> float:
    """The rate of :func:`one_cycle`."""
    return one_cycle(*values, **named)[0]


def one_cycle_betas(n: int, **params: Any) -> tuple[float, float] | None:
    """Both betas of :func:`one_cycle`, given its parameters without the optimizer's rate."""
    return one_cycle(n, 0.0, **params)[1]


def lr_range_test(
    n: int,
    lr: float,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> float:
    """The rate grows without end, on a straight line or in stairs."""
    interval = n / lr_range_test_step_size
    return lr_range_test_min_lr * (
        1 + lr_range_test_step_rate * (math.floor(interval) if lr_range_test_staircase else interval)
    )


FORMULAS: Mapping[str, Callable[..., float]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle_lr,
    "LRRangeTest": lr_range_test,
}
"""``scheduler.type`` -> formula."""


def _warmed(i: int, num_steps: int, kind: str) -> float:
    """The share of the warm-up that is over, 0 at i = 0."""
    return i / num_steps if kind == "linear" else math.log(i + 1) / math.log(num_steps)


def _height(n: int, first: int, second: int, stairs: tuple[int, int | None]) -> float:
    """The height of the cycle after n steps, from 0 to 1."""
    at = n % (first + second)
    way, count = (at / first, stairs[0]) if at <= first else ((first + second - at) / second, stairs[1])
    count = stairs[0] if count is None else count
    if not count:
        return way
    position = at * count / first if at <= first else (first + second - at) * count / second
    return math.floor(position) / count
