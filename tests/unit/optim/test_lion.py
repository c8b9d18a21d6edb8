"""Lion beside its plain formula, at every ratio."""

import pytest

from tests.unit.optim.plain_runs import LION_WORDS, assert_follows, lion


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--cpu-optimizer --cpu-optimizer-ratio 0.3",
        "--cpu-optimizer --cpu-optimizer-ratio 1 --offload-speculation on",
        "--cpu-optimizer --cpu-parameters",
    ],
)
def test_training_follows_the_plain_formula(flags: str) -> None:
    assert_follows(LION_WORDS, flags, lion())
