"""Parameter groups that share nothing: the same bits by however many launches they are updated, and one launch each."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.group_ranges import Family, GroupRange
from tests.unit.engine.four_groups import JOINED, SEPARATE, flat_after


def test_torchs_operators_have_the_same_bits() -> None:
    wanted = flat_after("cpu", SEPARATE)
    for families in (SEPARATE, JOINED):
        found = flat_after("cpu", families, replace(ADAMW, device_kernel=None))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def flat(
    group_ranges: Sequence[GroupRange], families: Sequence[Family], dtype: torch.dtype = torch.float32
) -> FlatOptimizer:
    state = {name: torch.ones(group_ranges[-1].stop, dtype=dtype) for name in ADAMW.vectors}
    grad = torch.ones(group_ranges[-1].stop, dtype=dtype)
    steps = torch.zeros((), dtype=torch.float64)
    return FlatOptimizer([ADAMW] * 4, FlatState(state, grad, steps), group_ranges, families)


def launches(adam: FlatOptimizer) -> list[list[tuple[int, int]]]:
    """(start, stop) of each, by family."""
    return [[(p.vectors[0].storage_offset(), p.vectors[0].storage_offset() + len(p.vectors[0])) for p in pieces]
            for pieces in adam._calls]  # fmt: skip


def test_what_lies_together_is_one_launch() -> None:
    """Over units and over padding, unless another family or other memory is between."""
    alternating = [GroupRange(128 * k, 128 * k + 100, k % 2) for k in range(6)]
    for families in (((0, 1),), ((1, 0),)):
        whole = flat(alternating, families)
        whole.lay_out([(0, 256, None), (256, 740, None)])
        assert launches(whole) == [[(0, 740)]]
    apart = flat(alternating, ((1,), (0,)))
    apart.lay_out([(0, 256, None), (256, 740, None)])
    every = [(128 * k, 128 * k + 100) for k in range(6)]
    assert launches(apart) == [every[1::2], every[::2]]
    same = [GroupRange(one.start, one.stop, 0) for one in alternating]
    single = flat(same, ((0,),))
    single.lay_out([(0, 256, None), (256, 740, None)])
    assert launches(single) == [[(0, 740)]]
    assert single._calls[0][0].decays is None and whole._calls[0][0].decays is not None
    single.lay_out([(0, 256, torch.zeros(256)), (256, 740, torch.zeros(484))])
    assert launches(single) == [[(0, 228), (256, 740)]]
    three = flat([GroupRange(64 * k, 64 * k + 64, group) for k, group in enumerate((2, 0, 1, 2))], ((0, 1), (2,)))
    three.lay_out([(0, 256, None)])
    assert launches(three) == [[(64, 192)], [(0, 64), (192, 256)]]


def test_groups_of_a_family_that_differ_are_refused() -> None:
    group_ranges = [GroupRange(0, 64, 0), GroupRange(64, 128, 1)]
    adam = flat(group_ranges, ((0, 1),))
    adam.lay_out([(0, 128, None)])
    decays = AdamHyperparameters(0.1, 0.9, 0.95, 1e-8, 0.1)
    adam.check((decays, decays._replace(weight_decay=0.0)))
    for other in (decays, decays._replace(lr=0.2, weight_decay=0.0)):
        with pytest.raises(ValueError, match="groups 0 and 1 are updated together"):
            adam.check((decays, other))
    for families in (((0,),), ((0, 1), (1,)), ((0, 0, 1),)):
        with pytest.raises(ValueError, match=r"each of the groups \[0, 1\] has to be in one"):
            flat(group_ranges, families)
