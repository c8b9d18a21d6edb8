"""Where a unit's parameters lie, and which elements of them a shard has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gptpar.engine.units import Unit
from gptpar.optim.group_ranges import ALIGNMENT, DECAYS, DECAYS_NOT
from gptpar.topology.placement import Placement, Split
from tests.unit.engine.small_units import SHAPES, infos, table_of


def test_a_unit_is_aligned_and_ordered_by_kind() -> None:
    unit = Unit.of("layer", infos(SHAPES), 4)
    assert list(unit.params) == ["first.weight", "last.matrix", "first.bias", "norm.weight", "last.weight"]
    assert [param.start for param in unit.params.values()] == [0, 64, 192, 256, 320]
    assert [param.end for param in unit.params.values()] == [64, 192, 256, 320, 448]
    assert (unit.length, unit.shard_length) == (512, 128)
    assert Unit.of("layer", infos(SHAPES), 3).length == 576 and Unit.of("layer", infos(SHAPES), 1).length == 448
    assert all(param.start % ALIGNMENT == 0 for param in unit.params.values())
    assert unit.views(torch.arange(512))["norm.weight"].tolist() == [256, 257, 258, 259, 260]
    assert unit.views(torch.arange(512))["last.matrix"].shape == (10, 10)


def test_uneven_shares_reserve_the_longest() -> None:
    """Every tensor rank's parameters begin at the same places: their collectives over the data axis stay alike."""
    shapes = {"norm.weight": (5,), "tokens.weight": (12, 8), "head.weight": (3, 4)}
    longest = {"tokens.weight": Split(0, 25, 0, 13)}
    short = Unit.of("ends", infos(shapes, longest), 2)
    long = Unit.of("ends", infos({**shapes, "tokens.weight": (13, 8)}, {"tokens.weight": Split(0, 25, 12, 13)}), 2)
    assert list(short.params) == ["head.weight", "norm.weight", "tokens.weight"]
    assert [(s.start, s.end) for s in short.params.values()] == [(s.start, s.end) for s in long.params.values()]
    assert [u.params["tokens.weight"].stop for u in (short, long)] == [128 + 96, 128 + 104]
    assert short.length == long.length == 256
    assert [param.replicated for param in short.params.values()] == [True, True, False]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_hold_every_element_once(shards: int) -> None:
    unit = Unit.of("layer", infos(SHAPES, {"last.matrix": Split(1, 20, 10, 10)}), shards)
    times = {name: torch.zeros(param.shape.numel()) for name, param in unit.params.items()}
    for shard in range(shards):
        for one in table_of(unit, shard).ranges():
            assert 0 <= one.first < one.first + one.length
            times[one.param][one.first : one.first + one.length] += 1
    assert all(bool((counts == 1).all()) for counts in times.values())


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_spans_are_disjoint_and_say_how_each_element_is_treated(shards: int) -> None:
    """On the second tensor-parallel rank, which counts what it alone has."""
    unit = Unit.of("layer", infos(SHAPES, {"last.matrix": Split(1, 20, 10, 10)}), shards)
    treated = torch.full((unit.length, 2), -1)
    for shard in range(shards):
        table, low, stop = table_of(unit, shard, tensor_rank=1), shard * unit.shard_length, 0
        for one in table.group_ranges("layer"):
            assert stop <= one.start < one.stop <= unit.shard_length
            treated[low + one.start : low + one.stop] = torch.tensor([one.group, 0])
            stop = one.stop
        for start, stop in table.counted("layer"):
            treated[low + start : low + stop, 1] = 1
    for param in unit.params.values():
        assert treated[param.start : param.end].unique(dim=0).tolist() == [[param.group, not param.replicated]]
    assert int((treated[:, 0] >= 0).sum()) == sum(param.end - param.start for param in unit.params.values())
    whole = table_of(Unit.of("l", infos(SHAPES), 1))
    assert [one.group for one in whole.group_ranges("l")] == [DECAYS, DECAYS_NOT] and whole.counted("l") == [(0, 448)]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_is_summed_lies_together_and_is_the_same_on_all_tensor_ranks(shards: int) -> None:
    """Messages over the tensor axis match by their lengths, however uneven the ranks' shares."""
    messages = []
    for rows, start in ((12, 0), (13, 12)):
        known = infos({**SHAPES, "tokens.weight": (rows, 8)}, {"tokens.weight": Split(0, 25, start, 13)})
        for name in ("norm.weight", "last.matrix"):
            known[name] = replace(known[name], placement=Placement(gradient_sum=frozenset({"tensor"})))
        unit = Unit.of("layer", known, shards)
        assert [name for name, param in unit.params.items() if param.info.placement.gradient_sum] == [
            "last.matrix",
            "norm.weight",
        ]
        summed = [table_of(unit, shard).messages("layer", "tensor") for shard in range(shards)]
        assert sum(stop - start for parts in summed for start, stop in parts) == 128 + 64
        messages.append(summed)
    assert messages[0] == messages[1]
