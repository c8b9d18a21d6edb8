"""Python's switch interval has one owner, whoever wants it short and in whatever order they are done."""

from __future__ import annotations

import sys

import pytest
import torch

from gptpar import TwinFlowAdamW
from gptpar.offload.host_optimizer import SWITCH_SECONDS


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
