"""DeepSpeed's schedules, step by step."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from gptpar.adapter.options import SchedulerOptions
from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.deepspeed.engines.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    scheduler_of,
)
from gptpar.errors import GptparError
from gptpar.optim.adamw import ADAMW
from gptpar.optim.loss_scale import LossScale


def optimizer_over(groups: list[dict[str, Any]]) -> EngineOptimizer:
    scale = LossScale(1.0, dynamic=False)
    return EngineOptimizer([ADAMW] * len(groups), groups, lambda: None, lambda: None, scale, torch.flatten, bool, int)


def optimizer_of(*rates: float) -> EngineOptimizer:
    numbers = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0}
    return optimizer_over([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr, **numbers} for lr in rates])


def rates_of(make: Callable[[EngineOptimizer], LRScheduler], steps: int, *lr: float) -> list[Any]:
    """The rate of each step, of all groups if there are several."""
    optimizer = optimizer_of(*lr or (1.0,))
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        now = [how.lr for how in optimizer.hyperparameters()]
        found.append(now if len(now) > 1 else now[0])
        optimizer.step()
        scheduler.step()
    return found


def test_a_warmup_ends_at_each_groups_rate() -> None:
    found = rates_of(lambda o: WarmupLR(o, warmup_num_steps=2, warmup_type="linear"), 4, 0.5, 0.1)
    assert found == [[0, 0], [0, 0], [0.25, 0.05], [0.5, 0.1]]
    found = rates_of(lambda o: WarmupLR(o, (0, 0.1), (0.4, 0.3), 2, "linear"), 4, 0.5, 0.1)
    assert found[2] == pytest.approx([0.2, 0.2]) and found[3] == pytest.approx([0.4, 0.3])


def test_a_cosine_is_a_share_of_each_groups_rate() -> None:
    def share(way: float) -> float:
        return 0.1 + 0.9 * (1 + math.cos(math.pi * way)) / 2

    expected = [0, 0.5, 0.75, share(1 / 4), share(2 / 4), share(3 / 4), 0.1, 0.1]
    found = rates_of(lambda o: WarmupCosineLR(o, 6, 0.5, 2, 0.1, "linear"), 8, 2.0, 0.4)
    assert [two[0] for two in found] == pytest.approx([2 * one for one in expected])
    assert [two[1] for two in found] == pytest.approx([0.4 * one for one in expected])


def test_a_warmup_longer_than_the_decay_and_a_cycle_without_a_second_part() -> None:
    found = rates_of(lambda o: WarmupDecayLR(o, 1, 0.1, 0.9, 2, "linear"), 5)
    assert found == pytest.approx([0.1, 0.1, 0.5, 0.1, 0.1])
    found = rates_of(lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=4, cycle_second_step_size=0), 4)
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_resumed_schedule_goes_on() -> None:
    options = SchedulerOptions("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.5})
    whole = rates_of(lambda o: scheduler_of(None, o, options), 9)  # type: ignore[arg-type, return-value]
    assert scheduler_of(None, optimizer_of(1.0), None) is None
    found = []
    saved: Any = None
    for steps in (4, 5):
        optimizer = optimizer_of(1.0)
        scheduler: Any = scheduler_of(None, optimizer, options)
        for one, state in zip((optimizer, scheduler), saved or (), strict=False):
            one.load_state_dict(state)
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        saved = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict()])
    assert found == whole and scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


# --- the client's ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_clients_scheduler_over_the_optimizer_that_was_taken_over() -> None:
    client = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    theirs = LambdaLR(client, lambda n: 1 / (n + 1))
    optimizer = optimizer_over(client.param_groups)
    scheduler = scheduler_of(theirs, optimizer, SchedulerOptions("WarmupLR", {}))
    assert scheduler is theirs
    optimizer.step()
    scheduler.step()
    assert [how.lr for how in optimizer.hyperparameters()] == [0.5]
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert [how.lr for how in optimizer.hyperparameters()] == pytest.approx([1 / 3])


@pytest.mark.filterwarnings("error")
def test_a_function_from_the_returned_optimizer_may_move_betas_too() -> None:
    optimizer = optimizer_of(1.0)
    scheduler = scheduler_of(lambda o: OneCycleLR(o, 0.1, total_steps=10), optimizer, None)
    assert isinstance(scheduler, OneCycleLR)
    before = optimizer.hyperparameters()[0]
    optimizer.step()
    scheduler.step()
    after = optimizer.hyperparameters()[0]
    assert before.lr == pytest.approx(0.004) and after.lr > before.lr and after.beta1 < before.beta1 == 0.95


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (lambda o: WarmupLR(optimizer_of(1.0)), r"the rates of another optimizer \(EngineOptimizer\) than the one"),
        (ReduceLROnPlateau, "is a ReduceLROnPlateau, whose step needs a metric .* and step it yourself"),
        (lambda o: 3, "is, or returns, what is of type int: pass a torch.optim.lr_scheduler, or a function from"),
        (lambda o: WarmupLR(o, [0.1, 0.2]), r"^warmup_min_lr has 2 rate\(s\) for 1 parameter group\(s\): give one, or"),
    ],
)
def test_schedulers_that_do_not_fit(client: Any, said: str) -> None:
    with pytest.raises(GptparError, match=said):
        scheduler_of(client, optimizer_of(1.0), None)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (WarmupLR, {"warmup_num_steps": None}, "warmup_num_steps is None: give a whole number of steps, 0 or more."),
        (WarmupDecayLR, {"warmup_num_steps": -5, "total_num_steps": 9}, "warmup_num_steps is -5: give a whole number"),
        (WarmupCosineLR, {"total_num_steps": 9, "warmup_type": "lin"}, "warmup_type is 'lin': give 'log' or 'linear'."),
        (LRRangeTest, {"lr_range_test_step_size": 0}, "lr_range_test_step_size is 0: .* 1 or more."),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size is 0: "),
    ],
)
def test_a_schedule_refuses_what_it_cannot_follow(kind: Any, params: dict[str, Any], message: str) -> None:
    """As torch's own schedules do, with a ValueError."""
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(optimizer_of(0.1), **params)


def test_parameters_of_a_schedule_are_its_attributes() -> None:
    cosine = WarmupCosineLR(optimizer_of(0.1, 0.2), 6, warmup_type="linear")
    assert (cosine.warmup_type, cosine.total_num_steps, hasattr(cosine, "min_lrs")) == ("linear", 6, False)
    assert WarmupLR(optimizer_of(0.1, 0.2)).max_lrs == [0.1, 0.2]
    assert WarmupLR(optimizer_of(1.0, 1.0), warmup_max_lr=[0.1, 0.2]).max_lrs == [0.1, 0.2]
    cycle = OneCycle(optimizer_of(0.1, 0.2), [0.001, 0.002], 0.01, cycle_first_step_size=30, cycle_second_step_size=10)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio) == ([0.001, 0.002], [0.01, 0.01], 0.75)


def test_a_cycle_tells_its_betas_and_a_warmup_its_share() -> None:
    """The betas of the next step; the share is that of each group's own rate."""
    optimizer = optimizer_of(0.1)
    cycle = OneCycle(optimizer, 0.0, 0.1, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    for beta in (0.9, 0.85, 0.8, 0.85):
        assert cycle.get_mom()[0] == pytest.approx((beta, 0.99))
        optimizer.step()
        cycle.step()
    optimizer = optimizer_of(0.1, 0.2)
    warmup = WarmupCosineLR(optimizer, total_num_steps=100, warmup_num_steps=10)
    assert warmup.get_lr_ratio() == 0
    optimizer.step()
    warmup.step(1)
    assert warmup.get_lr_ratio() == pytest.approx(math.log(2) / math.log(10))
    assert warmup.get_last_lr() == pytest.approx([0.1 * warmup.get_lr_ratio(), 0.2 * warmup.get_lr_ratio()])
