"""Python's switch interval has one owner, whoever wants it short and in whatever order they are done."""

from __future__ import annotations

import sys

import pytest
import torch

from gptpar import TwinFlowAdamW
from gptpar.offload.updating_thread import SWITCH_SECONDS
from gptpar.system.switch_interval import SHORT_SECONDS, SWITCH_INTERVAL


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_restore_it_when_both_are_closed(first: int) -> None:
    before = sys.getswitchinterval()
    optimizers = [TwinFlowAdamW([torch.nn.Parameter(torch.ones(4))], offload_ratio=1.0) for _ in range(2)]
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    optimizers[first].close()
    optimizers[first].close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    optimizers[1 - first].close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_it_is_short_within_a_context_and_as_before_after_it() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), SWITCH_INTERVAL.short():
        assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS)
        raise ZeroDivisionError
    assert sys.getswitchinterval() == pytest.approx(before)
