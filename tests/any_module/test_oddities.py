"""Every oddity by name, on two processes with all of ZeRO, and every second one in one of three other layouts."""

import pytest

from tests.any_module.case import Setup
from tests.any_module.layouts import covering
from tests.any_module.matrix import Bench
from tests.any_module.oddities import ODDITIES

STEPS = 4
SETUPS = [
    Setup(1, 0, 0.6, steps=STEPS),
    Setup(1, 3, 0.0, accumulation=3, clip=0.0, steps=STEPS),
    Setup(2, 0, 0.0, accumulation=2, steps=STEPS),
    Setup(2, 3, 0.6, steps=STEPS),
]


@pytest.mark.parametrize(("name", "setup"), covering(ODDITIES, SETUPS))
def test_oddity(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, setup)
