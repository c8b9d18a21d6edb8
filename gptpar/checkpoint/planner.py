"""Who writes which box of which tensor: torch.distributed.checkpoint's default plan, without its traps."""

from __future__ import annotations

import dataclasses
from math import prod

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from gptpar.errors import CheckpointError


class ChunkSavePlanner(DefaultSavePlanner):
    """The default planner (replicas written once, spread over ranks) without its two traps."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # An empty shard can share its offset with another rank's full one and replace it as its "duplicate".
        items = [item for item in plan.items if prod(tensor_data(item).chunk.sizes) or not prod(tensor_data(item).size)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                shape, dtype = tensor_data(item).size, tensor_data(item).properties.dtype
                other, known_shape, known_dtype = seen.setdefault(item.index.fqn, (rank, shape, dtype))
                if (known_shape, known_dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"ranks disagree about tensor {item.index.fqn!r}: {dtype} {list(shape)} on rank "
                        f"{rank}, {known_dtype} {list(known_shape)} on rank {other}"
                    )
        return super().create_global_plan(all_plans)


def tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, item.index
    return item.tensor_data


def item_bytes(item: WriteItem) -> int:
    return prod(tensor_data(item).chunk.sizes) * tensor_data(item).properties.dtype.itemsize
