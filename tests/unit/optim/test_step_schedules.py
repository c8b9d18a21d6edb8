"""DeepSpeed's schedules beside an oracle: its schedulers written down as what they are, objects that are stepped."""

import ast
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.adapter.options import read_options
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.deepspeed.engines.schedulers import scheduler_of
from gptpar.optim.schedule import make_schedule

STEPS = 60
LR = 3e-4
Rates = Iterator[float]


def warmed(i: int, kind: str, n: int) -> float:
    return math.log(i + 1) / math.log(n) if kind == "log" else i / n


def stepped(value: Callable[[int], float], before: float) -> Rates:
    """A scheduler whose counter is -1 and then i = 0, 1, ...: it is stepped after the optimizer, and says the rate."""
    rate, i = before, 0
    while True:
        yield rate
        rate, i = value(i), i + 1


def warmup(kind: str = "log", n: int = 1000, low: float = 0.0, high: float = LR) -> Rates:
    n = max(n, 2)
    return stepped(lambda i: low + (high - low) * warmed(i, kind, n) if i < n else high, low)


def decay(total: int, kind: str = "log", n: int = 1000, low: float = 0.0, high: float = 1e-3) -> Rates:
    def value(i: int) -> float:
        share = warmed(i, kind, n) if i < n else max(0.0, (total - i) / max(1.0, total - n))
        return low + (high - low) * share

    return stepped(value, low)


def cosine(total: int, kind: str = "log", n: int = 1000, start: float = 0.0, end: float = 1e-4) -> Rates:
    def value(i: int) -> float:
        if i < n:
            return LR * (start + (1 - start) * warmed(i, kind, n))
        way = min(1.0, (i - n + 1) / max(1, total - n))
        return LR * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * way)) / 2)

    return stepped(value, 0.0)


def cycle(up: int, down: int, low: float, high: float, every: int = 0, rate: float = 0.0) -> Rates:
    """Linear pieces between (0, low), (up, high), (up + down, low), again low, and then the decay."""
    for n in range(STEPS):
        if n <= up:
            yield low + (high - low) * n / up
        elif n <= up + down:
            yield low + (high - low) * (up + down - n) / down
        else:
            yield low / (1 + rate * (n - up - down) / every) if every else low


def stairs_up(low: float, size: int, rate: float, staircase: bool) -> Rates:
    for n in range(STEPS):
        yield low * (1 + rate * (n // size if staircase else n / size))


SCHEDULES: list[tuple[str, Callable[[], Rates]]] = [
    ("WarmupLR", warmup),
    ("WarmupLR warmup_num_steps=0", lambda: warmup(n=0)),
    (
        "WarmupLR warmup_min_lr=1e-5 warmup_max_lr=2e-3 warmup_num_steps=9 warmup_type='linear'",
        lambda: warmup("linear", 9, 1e-5, 2e-3),
    ),
    (
        "WarmupDecayLR total_num_steps=30 warmup_num_steps=5 warmup_type='linear' warmup_max_lr=6e-4 "
        "warmup_min_lr=6e-5",
        lambda: decay(30, "linear", 5, 6e-5, 6e-4),
    ),
    ("WarmupCosineLR total_num_steps=50 warmup_num_steps=7", lambda: cosine(50, n=7)),
    (
        "WarmupCosineLR total_num_steps=40 warmup_num_steps=4 warmup_min_ratio=0.1 cos_min_ratio=0.2 "
        "warmup_type='linear'",
        lambda: cosine(40, "linear", 4, 0.1, 0.2),
    ),
    (
        "OneCycle cycle_min_lr=1e-4 cycle_max_lr=1e-3 cycle_first_step_size=10 cycle_second_step_size=15 "
        "decay_step_size=4 decay_lr_rate=0.5 cycle_momentum=False",
        lambda: cycle(10, 15, 1e-4, 1e-3, 4, 0.5),
    ),
    (
        "LRRangeTest lr_range_test_min_lr=1e-4 lr_range_test_step_size=7 lr_range_test_step_rate=3.0",
        lambda: stairs_up(1e-4, 7, 3.0, False),
    ),
    ("LRRangeTest lr_range_test_step_size=9 lr_range_test_staircase=True", lambda: stairs_up(1e-3, 9, 1.0, True)),
]
"""A scheduler with its parameters -> its rates."""


def file_of(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": LR}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "scheduler": {"type": kind, "params": params}}


def of_a_run(tmp_path: Path, kind: str, params: dict[str, Any], *more: str, samples: int = STEPS * 8) -> Any:
    """The schedule of ``gptpar pretrain``, and the samples of a step."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file_of(kind, params)))
    flags = f"--preset 124M --train-iters {STEPS} --mock-data --vocab-size 100 --deepspeed --deepspeed_config {path}"
    config, _ = resolve(parse_flags([*flags.split(), *more]), 4)
    return make_schedule(config, samples), config.batch.global_batch_size


def of_an_engine(kind: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameter group of each step of ``gptpar.initialize``."""
    options = read_options(file_of(kind, params), world=1)
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": LR, "betas": (0.9, 0.999)}
    optimizer = torch.optim.AdamW([group])
    scheduler = scheduler_of(None, optimizer, options.scheduler)
    assert scheduler is not None
    for _ in range(STEPS):
        yield dict(optimizer.param_groups[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("words", "oracle"), SCHEDULES)
def test_every_steps_rate_is_deepspeeds_at_both_doors(tmp_path: Path, words: str, oracle: Callable[[], Rates]) -> None:
    kind, *given = words.split()
    params = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in given)}
    expected = [rate for rate, _ in zip(oracle(), range(STEPS), strict=False)]
    schedule, samples = of_a_run(tmp_path, kind, params)
    assert samples == 8
    assert [schedule.learning_rate(n * samples) for n in range(STEPS)] == pytest.approx(expected, rel=1e-13, abs=1e-18)
    assert [group["lr"] for group in of_an_engine(kind, params)] == pytest.approx(expected, rel=1e-13, abs=1e-18)


def test_a_cycles_stairs_are_flat() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size": 4}
    stairs = {"cycle_first_stair_count": 3, "cycle_second_stair_count": 2}
    found = [group["lr"] for group in of_an_engine("OneCycle", {**params, **stairs})][:11]
    third = 1 / 3
    assert found == pytest.approx([0, 0, third, third, 2 * third, 2 * third, 1, 0.5, 0.5, 0, 0])


def test_a_cycles_betas_go_against_its_rate(tmp_path: Path) -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "decay_step_size": 2}
    momentum = {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1}
    expected = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    groups = [group["betas"] for group in of_an_engine("OneCycle", {**params, **momentum})][:7]
    assert [betas[0] for betas in groups] == pytest.approx(expected) and {betas[1] for betas in groups} == {0.99}
    schedule, samples = of_a_run(tmp_path, "OneCycle", {**params, **momentum})
    assert [schedule.betas(n * samples) for n in range(7)] == groups
    assert of_a_run(tmp_path, "WarmupLR", {})[0].betas(0) is None


def test_a_growing_batch_counts_steps_not_samples(tmp_path: Path) -> None:
    params = {"warmup_num_steps": 6, "warmup_type": "linear"}
    growing = "--step-batch-size-schedule", "0:8 32768:16"
    schedule, _ = of_a_run(tmp_path, "WarmupLR", params, *growing, samples=4 * 8 + 16 * 16)
    starts = [0, 8, 16, 24, 32, 48, 64, 80]
    assert [schedule.learning_rate(at) / LR * 6 for at in starts] == pytest.approx([0, 0, 1, 2, 3, 4, 5, 6])
