"""Vectors of states hold only elements whose update has the state."""

import pytest
import torch

from gptpar.optim.adamw import ADAMW
from gptpar.optim.group_ranges import GroupRange
from gptpar.optim.lion import LION
from gptpar.optim.muon import MUON
from gptpar.optim.state_layout import CompactVector, StateLayout

RANGES = [GroupRange(0, 100, 0), GroupRange(128, 200, 1), GroupRange(256, 400, 0), GroupRange(448, 460, 2)]


def test_a_state_has_the_elements_of_groups_that_keep_it_alone() -> None:
    layout = StateLayout(RANGES, [ADAMW, MUON, MUON], 512)
    assert layout.lengths == {"exp_avg": 512, "exp_avg_sq": 128 + 144}
    vector = torch.arange(272)
    assert torch.equal(layout.view("exp_avg_sq", vector, 10, 90), vector[10:90])
    assert torch.equal(layout.view("exp_avg_sq", vector, 256, 400), vector[128:272])
    assert torch.equal(layout.view("weights", torch.arange(512), 128, 200), torch.arange(128, 200))
    with pytest.raises(AssertionError):
        layout.view("exp_avg_sq", vector, 130, 140)
    assert StateLayout(RANGES, [LION, MUON, ADAMW], 512).lengths == {"exp_avg": 512, "exp_avg_sq": 12}
    for ranges in (RANGES, []):
        assert StateLayout(ranges, [ADAMW] * 3, 512).lengths == {"exp_avg": 512, "exp_avg_sq": 512}


def test_padding_between_neighbours_stays_and_runs_begin_at_blocks() -> None:
    compact = CompactVector(RANGES, {0, 1}, 512)
    assert compact.length == 400  # one run, with the padding inside
    others = CompactVector(RANGES, {1, 2}, 512)
    assert others.length == 128 + 12
    assert torch.equal(others.view(torch.arange(140), 448, 460), torch.arange(128, 140))
    assert CompactVector(RANGES, {7}, 512).length == 0
