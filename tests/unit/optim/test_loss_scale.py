"""The loss scale of fp16: when it grows, when it shrinks, when the run ends."""

import pytest

from gptpar.errors import GptparError
from gptpar.optim.loss_scale import LossScale


def test_dynamic_loss_scale_follows_megatron() -> None:
    scale = LossScale(16.0, dynamic=True, minimum=1.0, window=2, hysteresis=2, tolerance=2)
    seen = []
    for overflow in (True, True, True, False, False, True, False, True):
        scale.update(overflow)
        seen.append(scale.value)
    # The first overflow is tolerated; two good steps double the scale and restore the tolerance.
    assert seen == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0]


def test_good_steps_are_counted_in_a_row() -> None:
    scale = LossScale(16.0, dynamic=True, window=3, hysteresis=3, tolerance=3)
    seen = []
    for overflow in (False, False, True, False, False, False):
        scale.update(overflow)
        seen.append(scale.value)
    assert seen == [16.0] * 5 + [32.0]


def test_a_window_shortened_on_resume_still_lets_the_scale_grow() -> None:
    scale = LossScale(8.0, dynamic=True, window=2, hysteresis=2)
    scale.load(LossScale(16.0, dynamic=True, window=1000, good_steps=700).state())
    scale.update(False)
    assert (scale.value, scale.good_steps) == (32.0, 0)


def test_loss_scale_at_its_minimum_stops_the_run() -> None:
    scale = LossScale(2.0, dynamic=True, minimum=1.0, hysteresis=1, tolerance=1)
    scale.update(True)
    with pytest.raises(GptparError, match="already at its minimum"):
        scale.update(True)


def test_a_hysteresis_shortened_on_resume_counts_at_once() -> None:
    scale = LossScale(8.0, dynamic=True, hysteresis=1, tolerance=1)
    scale.load(LossScale(8.0, dynamic=True, hysteresis=5, tolerance=5).state())
    scale.update(True)
    assert scale.value == 4.0
