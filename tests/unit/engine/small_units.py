"""Units of a few parameters of uneven sizes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.pipeline.stage import ParameterInfo
from gptpar.tensor_parallel.axis import Split
from gptpar.topology.initial_values import Constant

SHAPES = {
    "first.weight": (3, 5),
    "first.bias": (2, 7),  # a bias stays without decay whatever its shape
    "norm.weight": (5,),
    "last.weight": (65,),
    "last.matrix": (10, 10),
}


def infos(shapes: Mapping[str, tuple[int, ...]], splits: Mapping[str, Split] | None = None) -> dict[str, ParameterInfo]:
    return {
        n: ParameterInfo(torch.Size(s), (splits or {}).get(n), Constant(0.0), frozenset()) for n, s in shapes.items()
    }


def table_of(unit: Unit, shard: int = 0, tensor_rank: int = 0) -> ParameterTable:
    return ParameterTable([unit], Place(unit.shards, shard, tensor_rank=tensor_rank))
