"""Skip-step's rule against one written in plain Python."""

import json
import math
import random
import statistics

import pytest
import torch

from gptpar.optim.skip_step import OUTLIER, SkipStep, is_window

CPU = torch.device("cpu")


def oracle(steps: list[tuple[float, float]], sigma: float, window: int) -> list[bool]:
    """Whether each step is an outlier, by the definition."""
    found: list[bool] = []
    seen: list[tuple[float, float]] = []
    for step in steps:
        last = seen[-window:]
        is_finite = all(map(math.isfinite, step))
        judged = is_finite and len(last) >= max(2, window // 2)
        found.append(
            judged
            and any(
                value - statistics.fmean(before) > sigma * statistics.stdev(before)
                for value, before in zip(step, zip(*last, strict=True), strict=True)
            )
        )
        if is_finite:
            seen.append(step)
    return found


def judged(rule: SkipStep, steps: list[tuple[float, float]]) -> list[bool]:
    found = []
    for loss, norm in steps:
        pair = torch.tensor([loss, norm], dtype=torch.float64)
        told = rule.judge(*pair)
        reason = rule.reason(torch.tensor(float(not math.isfinite(told.item()))))
        outlier = reason.item() == OUTLIER
        assert torch.equal(told, pair[1]) or outlier or math.isnan(norm)
        assert reason.item() == (OUTLIER if outlier else float(not math.isfinite(norm)))
        found.append(outlier)
    return found


def history(seed: int, length: int = 120) -> list[tuple[float, float]]:
    """Losses that fall, norms that do not; some spikes, some steps that are not finite."""
    draw = random.Random(seed)
    steps = []
    for number in range(length):
        loss, norm = 4 - number / 100 + draw.gauss(0, 0.1), 1 + draw.gauss(0, 0.1)
        if draw.random() < 0.06:
            loss += draw.choice([0.2, 0.6, 3.0])
        if draw.random() < 0.06:
            norm += draw.choice([0.2, 0.6, 30.0])
        if draw.random() < 0.05:
            norm = draw.choice([math.nan, math.inf])
        steps.append((loss, norm))
    return steps


@pytest.mark.parametrize(("sigma", "window"), [(6.0, 16), (3.0, 16), (2.0, 2), (2.0, 3), (4.0, 128), (1.5, 5)])
def test_the_rule_is_that_of_its_definition(sigma: float, window: int) -> None:
    steps = history(seed=0)
    wanted = oracle(steps, sigma, window)
    assert judged(SkipStep(sigma, window, CPU), steps) == wanted
    assert any(wanted) or window == 128


@pytest.mark.parametrize("cut", [1, 20])
def test_a_resumed_window_decides_as_the_uninterrupted_one(cut: int) -> None:
    steps = history(5)
    whole, first, second = (SkipStep(2.5, 16, CPU) for _ in range(3))
    judged(first, steps[:cut])
    state = json.loads(json.dumps(first.state()))
    assert is_window(state)
    second.load(state)
    assert judged(whole, steps)[cut:] == judged(second, steps[cut:])
    assert whole.window() == second.window() and second.num_outliers == whole.num_outliers > 0
