"""Where a unit's parameters lie, and which elements of them a shard has."""

import torch

from gptpar.engine.units import Unit
from gptpar.optim.group_ranges import ALIGNMENT
from gptpar.topology.placement import Split
from tests.unit.engine.small_units import SHAPES, infos


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
