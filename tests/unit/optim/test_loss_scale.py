"""The loss scale of fp16: when it grows, when it shrinks, when the run ends."""

from collections.abc import Sequence

import pytest

from gptpar.errors import GptparError
from gptpar.optim.loss_scale import LossScale


def values(scale: LossScale, overflows: Sequence[bool]) -> list[float]:
    """After each step."""
    seen = []
    for overflow in overflows:
        scale.update(overflow)
        seen.append(scale.value)
    return seen


def test_dynamic_loss_scale_follows_megatron() -> None:
    """The first overflow is tolerated; two good steps double the scale and restore the tolerance."""
    scale = LossScale(16.0, dynamic=True, minimum=1.0, window=2, hysteresis=2, tolerance=2)
    overflows = (True, True, True, False, False, True, False, True)
    assert values(scale, overflows) == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0]


def test_good_steps_are_counted_in_a_row() -> None:
    scale = LossScale(16.0, dynamic=True, window=3, hysteresis=3, tolerance=3)
    assert values(scale, (False, False, True, False, False, False)) == [16.0] * 5 + [32.0]


def test_a_window_or_hysteresis_shortened_on_resume_counts_at_once() -> None:
    scale = LossScale(8.0, dynamic=True, window=2, hysteresis=2)
    scale.load(LossScale(16.0, dynamic=True, window=1000, good_steps=700).state())
    assert values(scale, [False]) == [32.0] and scale.good_steps == 0
    scale = LossScale(8.0, dynamic=True, hysteresis=1, tolerance=1)
    scale.load(LossScale(8.0, dynamic=True, hysteresis=5, tolerance=5).state())
    assert values(scale, [True]) == [4.0]


def test_loss_scale_at_its_minimum_stops_the_run() -> None:
    scale = LossScale(2.0, dynamic=True, minimum=1.0, hysteresis=1, tolerance=1)
    scale.update(True)
    with pytest.raises(GptparError, match="already at its minimum"):
        scale.update(True)
