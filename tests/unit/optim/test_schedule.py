"""Learning rate and weight decay over a run."""

import math

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.optim.schedule import make_schedule
from tests.helpers import TINY, tiny_config


def rates(flags: str, at: list[float]) -> list[float]:
    """Rates of a run of 500 steps of 2 samples."""
    schedule = make_schedule(tiny_config(f"--train-iters 500 {flags}"), 1000)
    return [schedule.learning_rate(n) for n in at]


def test_linear_decay_with_warmup_in_samples() -> None:
    flags = "--lr-warmup-iters 50 --min-lr 1e-3"  # 2 samples a step
    expected = [0.0, 5e-3, 1e-2, 1e-3 + 0.5 * 9e-3, 1e-3, 1e-3]
    assert rates(flags, [0, 50, 100, 550, 1000, 5000]) == pytest.approx(expected, rel=1e-12)


def test_cosine_decay_and_initial_rate() -> None:
    got = rates("--lr-decay-style cosine --lr-warmup-fraction 0.1 --lr-warmup-init 1e-4", [0, 50, 325, 1000, 1001])
    quarter = 0.5 * (math.cos(math.pi * 0.25) + 1) * 1e-2
    assert got == pytest.approx([1e-4, 1e-4 + 0.5 * 9.9e-3, quarter, 0.0, 0.0], rel=1e-12, abs=1e-18)


def test_constant_inverse_square_root_and_no_warmup() -> None:
    assert rates("--lr-decay-style constant", [0, 10**6]) == [1e-2, 1e-2]
    got = rates("--lr-decay-style inverse-square-root --lr-warmup-iters 50 --min-lr 4e-3", [100, 400, 900])
    assert got == pytest.approx([1e-2, 5e-3, 4e-3], rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_tails(style: str, half: float) -> None:
    flags = f"--lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style {style}"
    expected = [1e-2, 1e-2, half * 1e-2, 0.0]
    assert rates(flags, [10, 800, 900, 1000]) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_token_schedule_counts_tokens() -> None:
    flags = "--lr-decay-tokens 1600 --lr-warmup-tokens 160"
    assert rates(flags, [80, 160, 880, 1600]) == pytest.approx([5e-3, 1e-2, 5e-3, 0.0], rel=1e-12, abs=1e-18)
    assert make_schedule(tiny_config(flags), 100).in_tokens


def test_an_evaluation_alone_needs_no_learning_rate() -> None:
    words = [*TINY.replace("--lr 1e-2 ", "").split(), "--skip-train", "--load", "."]
    schedule = make_schedule(resolve(parse_flags(words), 1)[0], 0)
    assert (schedule.max_lr, schedule.total) == (0.0, 0)


@pytest.mark.parametrize(("style", "half"), [("linear", 0.2), ("cosine", 0.2)])
def test_weight_decay_grows(style: str, half: float) -> None:
    flags = f"--weight-decay-incr-style {style} --start-weight-decay 0.1 --end-weight-decay 0.3"
    schedule = make_schedule(tiny_config(flags), 1000)
    got = [schedule.weight_decay(n) for n in (0, 500, 1000, 2000)]
    assert got == pytest.approx([0.1, half, 0.3, 0.3], rel=1e-12)


def test_the_ends_have_a_rate_of_their_own_on_the_same_schedule() -> None:
    flags = "--train-iters 500 --lr-warmup-iters 50 --min-lr 1e-3 --decoupled-lr 5e-2 --decoupled-min-lr 2e-2"
    schedule = make_schedule(tiny_config(flags), 1000)
    assert [schedule.decoupled_rate(n) for n in (0, 50, 100, 550, 1000)] == pytest.approx(
        [0.0, 2.5e-2, 5e-2, 3.5e-2, 2e-2], rel=1e-12
    )
    assert schedule.learning_rate(550) == pytest.approx(5.5e-3, rel=1e-12)
    assert make_schedule(tiny_config("--min-lr 1e-3 --decoupled-lr 5e-2"), 40).decoupled_min == 1e-3
    assert make_schedule(tiny_config(""), 40).decoupled_rate(3) == make_schedule(tiny_config(""), 40).learning_rate(3)
