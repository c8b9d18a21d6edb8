"""Parameters whose memory is not row-major, that have no dims, or no elements: where each value is, and stays."""

from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import load_checkpoint, save_checkpoint
from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.ranges import Home, Place
from gptpar.engine.table import ParameterTable
from gptpar.optim.adamw import ADAMW
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import TENSOR, Mesh
from gptpar.topology.placement import ParameterInfo, Placement, Split
from gptpar.topology.tensor_parts import TensorParts
from tests.flat_parts import whole_tensors

LAST = torch.channels_last


def values() -> dict[str, torch.Tensor]:
    """Parameters as a module has them: channels last, a transposed matrix, without dims, without elements."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "convolution": normal(8, 3, 3, 3).to(memory_format=LAST),
        "depthwise": normal(6, 1, 3, 3).to(memory_format=LAST),
        "pointwise": normal(7, 5, 1, 1).to(memory_format=LAST),
        "volume": normal(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": normal(11, 13).t(),
        "scalar": normal(),
        "empty": normal(0, 3),
        "matrix": normal(5, 9),
    }


def declared(tensor: torch.Tensor) -> ParameterInfo:
    row_major = tensor.stride() == torch.empty(tensor.shape).stride()  # "contiguous" leaves it open where a size is 1
    strides = None if row_major else tensor.stride()
    return ParameterInfo(tensor.shape, Constant(0.0), strides=strides)


def table_of(place: Place, ratio: float) -> ParameterTable:
    """Two units, and one whose parameter has no elements."""
    infos = {name: declared(tensor) for name, tensor in values().items()}
    names = list(infos)
    units = {"first": names[:4], "second": names[4:]}
    layers = {unit: {name: infos[name] for name in inside} for unit, inside in units.items()}
    return ParameterTable.of({**layers, "third": {"nothing": declared(torch.zeros(0))}}, place, ratio=ratio)


def place(shards: int, shard: int = 0) -> Place:
    return Place(Mesh(data=shards), shard, int(shards > 1))


def box_of(offsets: tuple[int, ...], part: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("ratio", [0.0, 0.137, 0.5, 0.731, 1.0])
def test_ranges_bring_every_value_back(shards: int, ratio: float) -> None:
    """Each range's boxes have the global tensor's values; what is written through them arrives in the unit."""
    given, tables = values(), [table_of(place(shards, shard), ratio) for shard in range(shards)]
    units = tables[0].units
    memory = {unit.name: torch.zeros(unit.length) for unit in units}
    views = {name: view for unit in units for name, view in unit.views(memory[unit.name]).items() if name in given}
    for name, view in views.items():
        assert view.shape == given[name].shape and view.stride() == given[name].stride()
        view.copy_(given[name])
    found = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    times = {name: torch.zeros(tensor.shape) for name, tensor in given.items()}
    for shard, table in enumerate(tables):
        for one in table.ranges():
            here = memory[one.unit].chunk(shards)[shard][one.start : one.stop]
            whole = given[one.param]
            parts = TensorParts(whole.shape, table.views(one, here), whole.dtype)
            assert parts.num_held == one.length
            for offsets, part in parts.parts:
                found[one.param][box_of(offsets, part)] = part
                times[one.param][box_of(offsets, part)] += 1
            parts.fill(-whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    assert all(bool((count == 1).all()) for count in times.values())
    assert all(torch.equal(view, -given[name]) for name, view in views.items())
    assert not any(memory[unit.name][start:stop].any() for unit in units for start, stop in unit.padding)


def test_a_split_of_a_convolution_knows_its_place() -> None:
    """Channels last, of 13 filters the last 6 here and room for 7."""
    full = torch.randn(13, 3, 3, 3).to(memory_format=LAST)
    share = full[7:]
    info = ParameterInfo(share.shape, Constant(0.0), Placement({TENSOR: Split(0, 13, 7, 7)}), share.stride())
    table = ParameterTable.of({"layer": {"weight": info}}, ratio=0.3)
    buffer = torch.zeros(table.units[0].length)
    table.units[0].views(buffer)["weight"].copy_(share)
    found = torch.full_like(full, 7.0)
    for one in table.ranges():
        for offsets, part in table.views(one, buffer[one.start : one.stop]):
            found[box_of(offsets, part)] = part
    assert torch.equal(found[7:], share) and bool((found[:7] == 7.0).all())


def make_optimizer() -> MasterOptimizer:
    table = table_of(Place(), 0.0)
    return MasterOptimizer([ADAMW] * 4, table, torch.zeros(table.length(Home.DEVICE)), 0.0)


def test_a_checkpoint_brings_every_value_back(tmp_path: Path) -> None:
    """Of parameters with and without elements, in global shapes: a row-major model can load it."""
    given = {**values(), "nothing": torch.zeros(0)}
    saving, loading = make_optimizer().parts("weights"), make_optimizer().parts("weights")
    assert saving.keys() == given.keys()
    for name, parts in saving.items():
        parts.fill(given[name])
    save_checkpoint(tmp_path, 1, saving, {})
    plain = {name: torch.zeros(tensor.shape) for name, tensor in given.items()}
    load_checkpoint(tmp_path, plain)
    load_checkpoint(tmp_path, loading)
    loaded = whole_tensors(loading)
    assert all(torch.equal(plain[name], tensor) for name, tensor in given.items())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in given.items())


def test_memory_that_is_not_dense_is_refused() -> None:
    dense = torch.zeros(4, 6)
    for wrong in (dense[:, :3], dense[::2], dense[:1].expand(4, 6)):
        with pytest.raises(ValueError, match="does not fill its memory"):
            ParameterInfo(wrong.shape, Constant(0.0), strides=wrong.stride())
    with pytest.raises(ValueError, match="does not fill its memory"):
        ParameterInfo(dense.shape, Constant(0.0), strides=(1,))
    for right in (dense, dense.t(), dense[:, :1].clone(), dense[:1, :1], dense[:0], dense[0, 0]):
        ParameterInfo(right.shape, Constant(0.0), strides=right.stride())
