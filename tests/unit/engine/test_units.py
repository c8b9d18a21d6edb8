"""Where a unit's parameters lie, and which elements of them a shard has."""

import torch

from gptpar.engine.units import Unit
from gptpar.optim.group_ranges import ALIGNMENT
from tests.unit.engine.small_units import infos

SHAPES = {
    "first.weight": (3, 5),
    "first.bias": (2, 7),  # a bias stays without decay whatever its shape
    "norm.weight": (5,),
    "last.weight": (65,),
    "last.matrix": (10, 10),
}


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
