"""Divides the boxes of all tensors among the processes that hold them: each box is written once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from math import prod
from typing import NamedTuple

import torch

from gptpar.checkpoint.ranks import Ranks
from gptpar.errors import CheckpointError
from gptpar.topology.tensor_parts import Box, TensorParts, first_overlap


class HeldBox(NamedTuple):
    """A box of a tensor, as one or more ranks hold it.

    Attributes:
        name: of the tensor.
        offsets, sizes: in elements of the tensor.
        num_bytes: of the box.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


def held_boxes(tensors: Mapping[str, TensorParts]) -> dict[HeldBox, torch.Tensor]:
    """All boxes that this rank could write, with their elements."""
    return {
        HeldBox(name, tuple(offsets), tuple(part.shape), part.numel() * part.itemsize): part
        for name, tensor in tensors.items()
        for offsets, part in held_parts(tensor)
    }


def held_parts(tensor: TensorParts) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The parts with elements; all there is of a tensor without any."""
    if not tensor.shape.numel():
        return [((0,) * len(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype))]
    return [(offsets, part) for offsets, part in tensor.parts if part.numel()]


def who_writes(ranks: Ranks, tensors: Mapping[str, TensorParts]) -> tuple[list[int], list[set[int]]]:
    """What a save of tensors would write: (bytes of each rank's file, the ranks whose files each rank would load)."""
    held = ranks.each(lambda: list(held_boxes(tensors)))
    shares = divide(held)
    writers = {box: rank for rank, share in enumerate(shares) for box in share}
    return [sum(box.num_bytes for box in share) for share in shares], [{writers[box] for box in one} for one in held]


def divide(held: Sequence[Iterable[HeldBox]]) -> list[list[HeldBox]]:
    """The boxes that each rank writes: that one of a box's holders writes it that has the fewest bytes so far.

    Args:
        held: each rank's boxes.
    """
    holders: dict[HeldBox, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    num_bytes, shares = [0] * len(held), [list[HeldBox]() for _ in held]
    for box, ranks in holders.items():
        writer = min(ranks, key=num_bytes.__getitem__)
        num_bytes[writer] += box.num_bytes
        shares[writer].append(box)
    return shares


def require_tiling(shapes: Mapping[str, Sequence[int]], shares: Iterable[Iterable[HeldBox]]) -> None:
    """A layout with a mistake in it must not become a checkpoint with a hole.

    Args:
        shapes: of every tensor that any rank names.

    Raises:
        CheckpointError: some tensor's boxes do not hold each of its elements once.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for box in (box for share in shares for box in share):
        boxes[box.name].append((box.offsets, box.sizes))
    problems = []
    for name, shape in shapes.items():
        covered = sum(prod(sizes) for _, sizes in boxes[name])
        if boxes[name][1:] and (pair := first_overlap(shape, boxes[name])) is not None:
            one, other = starmap(lambda offsets, sizes: f"{list(sizes)} at {list(offsets)}", pair)
            problems.append(f"of tensor {name!r} {list(shape)} the parts {one} and {other} overlap")
        elif covered != prod(shape):
            problems.append(f"of tensor {name!r} {list(shape)} the ranks hold {covered} of {prod(shape)} elements")
    if problems:
        more = f" (and {len(problems) - 1} more tensors are not held exactly once)" if problems[1:] else ""
        raise CheckpointError(f"the layout is wrong: {problems[0]}{more}; nothing was written")
