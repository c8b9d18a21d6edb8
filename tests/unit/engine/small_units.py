"""Units of a few parameters of uneven sizes."""

from collections.abc import Mapping

import torch

from gptpar.engine.ranges import Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import TENSOR, Mesh
from gptpar.topology.placement import ParameterInfo, Placement, Split

SHAPES = {
    "first.weight": (3, 5),
    "first.bias": (2, 7),  # a bias stays without decay whatever its shape
    "norm.weight": (5,),
    "last.weight": (65,),
    "last.matrix": (10, 10),
}


def infos(shapes: Mapping[str, tuple[int, ...]], splits: Mapping[str, Split] | None = None) -> dict[str, ParameterInfo]:
    placed = {n: Placement({TENSOR: split}) for n, split in (splits or {}).items()}
    return {n: ParameterInfo(torch.Size(s), Constant(0.0), placed.get(n, Placement())) for n, s in shapes.items()}


def table_of(unit: Unit, shard: int = 0, tensor_rank: int = 0) -> ParameterTable:
    mesh = Mesh(unit.shards, 2)
    return ParameterTable([unit], Place(mesh, mesh.rank(data=shard, tensor=tensor_rank), int(unit.shards > 1)))
