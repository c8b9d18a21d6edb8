"""Decides which process writes or reads which box of which tensor, as torch.distributed.checkpoint's planners.

The default planners know plain tensors and DTensors, one box a rank. Ours know `TensorParts`, any boxes on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from math import prod

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.tiling import first_overlap
from gptpar.errors import CheckpointError
from gptpar.topology.tensor_parts import TensorParts


class ChunkSavePlanner(DefaultSavePlanner):
    """Every box is written once, by one of the ranks that hold it, and the boxes of a tensor must tile it."""

    def __init__(self, tensors: Mapping[str, TensorParts], shapes: Mapping[str, Sequence[int]]) -> None:
        """`tensors`: what this rank holds; `shapes`: of every tensor that any rank names."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._shapes = tensors, shapes

    def create_local_plan(self) -> SavePlan:
        return _local_plan(self._tensors)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(_write_once(all_plans))
        _require_tiling(self._shapes, metadata)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _part_at(self._tensors, index)


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Every rank reads the boxes that it holds, out of whatever boxes were saved."""

    state_dict: dict[str, TensorParts]

    def set_up_planner(
        self, state_dict: dict[str, TensorParts], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default would put None in the place of every object that it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, _chunks(tensor))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _part_at(self.state_dict, index)


def who_writes(ranks: Ranks, tensors: Mapping[str, TensorParts]) -> tuple[list[int], list[set[int]]]:
    """What a save of tensors would write: (bytes of each rank's file, the ranks whose files each rank would load)."""
    plans = ranks.each(lambda: _local_plan(tensors))
    shares = _write_once(plans)
    writers = {
        (item.index, tensor_data(item).chunk.sizes): rank for rank, one in enumerate(shares) for item in one.items
    }
    loaded = [{writers[item.index, tensor_data(item).chunk.sizes] for item in plan.items} for plan in plans]
    return [sum(map(item_bytes, share.items)) for share in shares], loaded


def tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, item.index
    return item.tensor_data


def item_bytes(item: WriteItem) -> int:
    return prod(tensor_data(item).chunk.sizes) * tensor_data(item).properties.dtype.itemsize


def _held(tensor: TensorParts) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The parts with elements, so that a box is known by where it begins; all there is of a tensor without any."""
    if not tensor.shape.numel():
        return [((0,) * len(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype))]
    return [(offsets, part) for offsets, part in tensor.parts if part.numel()]


def _chunks(tensor: TensorParts) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in _held(tensor)]


def _part_at(tensors: Mapping[str, TensorParts], index: MetadataIndex) -> torch.Tensor:
    return next(part for offsets, part in _held(tensors[index.fqn]) if offsets == index.offset)


def _local_plan(tensors: Mapping[str, TensorParts]) -> SavePlan:
    """All boxes that this rank could write."""
    items = []
    for name, tensor in tensors.items():
        properties = TensorProperties(dtype=tensor.dtype)
        for chunk in _chunks(tensor):
            data = TensorWriteData(chunk, properties, tensor.shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _write_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Leaves each box to that one of its holders that has the fewest bytes to write so far."""
    holders: dict[tuple[MetadataIndex, torch.Size], tuple[WriteItem, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault((item.index, tensor_data(item).chunk.sizes), (item, []))[1].append(rank)
    num_bytes, shares = [0] * len(plans), [SavePlan([]) for _ in plans]
    for item, ranks in holders.values():
        writer = min(ranks, key=num_bytes.__getitem__)
        num_bytes[writer] += item_bytes(item)
        shares[writer].items.append(item)
    return shares


def _require_tiling(shapes: Mapping[str, Sequence[int]], metadata: Metadata) -> None:
    """A layout with a mistake in it must not become a checkpoint with a hole.

    Raises:
        CheckpointError: some tensor's boxes do not hold each of its elements once.
    """
    problems = []
    for name, shape in shapes.items():
        stored = metadata.state_dict_metadata.get(name)
        chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        covered = sum(prod(sizes) for _, sizes in boxes)
        if (pair := first_overlap(shape, boxes)) is not None:
            one, other = starmap(lambda offsets, sizes: f"{list(sizes)} at {list(offsets)}", pair)
            problems.append(f"of tensor {name!r} {list(shape)} the parts {one} and {other} overlap")
        elif covered != prod(shape):
            problems.append(f"of tensor {name!r} {list(shape)} the ranks hold {covered} of {prod(shape)} elements")
    if problems:
        more = f" (and {len(problems) - 1} more tensors are not held exactly once)" if problems[1:] else ""
        raise CheckpointError(f"the layout is wrong: {problems[0]}{more}; nothing was written")
