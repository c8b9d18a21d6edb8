"""Copies between a parameter and a view of it that is stored as a tensor of its own, a block at a time. Pure.

A view of a parameter (rows of it, a transposed matrix, each group's queries) is written as a tensor of its own, or was
read as one. A block in memory has a box of the parameter, or consecutive elements of the view. Both are described
by patches: boxes of the view, with their elements. Elements are copied from a block of one kind to a block of the other
where their patches overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from gptpar.topology.tensor_parts import Box, box_view, flat_boxes, overlap

_Range = tuple[int, int]  # first index, number of indices


@dataclass(frozen=True)
class Patch:
    """A box of a view.

    Attributes:
        values: the box's elements, as the view shapes them, in the memory of a block.
    """

    box: Box
    values: torch.Tensor


@dataclass(frozen=True)
class _Axis:
    """A dim of a view that runs along a dim of the parameter.

    Attributes:
        dim: of the view.
        size: the dim's size.
        step: indices of the parameter's dim from one index to the next.
    """

    dim: int
    size: int
    step: int


class ParameterView:
    """The map from the elements of a view to those of its parameter.

    Args:
        shape: the parameter's shape.
        view: returns the view of a whole parameter; it splits, selects and permutes dims, and merges none.

    Attributes:
        shape: the view's shape.
    """

    def __init__(self, shape: Sequence[int], view: Callable[[torch.Tensor], torch.Tensor]):
        whole = torch.empty(tuple(shape), device="meta")
        seen = view(whole)
        self.shape = tuple(seen.shape)
        self._strides, self._offset = tuple(seen.stride()), int(seen.storage_offset())
        offset, self._first, self._axes = self._offset, list[int](), list[list[_Axis]]()
        left = [(dim, size, step) for dim, (size, step) in enumerate(zip(seen.shape, seen.stride(), strict=True))]
        left = [one for one in left if one[1] != 1]
        for size, step in zip(whole.shape, whole.stride(), strict=True):
            here = [one for one in left if size > 1 and one[2] >= step]
            left = [one for one in left if one not in here]
            axes = [_Axis(dim, count, its_step // step) for dim, count, its_step in here]
            self._axes.append(sorted(axes, key=lambda axis: -axis.step))
            self._first.append(offset // step if step else 0)
            offset = offset % step if step else 0

    def of_parameter(self, box: Box, values: torch.Tensor) -> list[Patch]:
        """Patches of a box of the parameter.

        Args:
            values: the box's elements, of the box's shape and any strides.
        """
        return [Patch(part, self._strided(part, box, values)) for part in self.boxes(box)]

    def of_elements(self, start: int, values: torch.Tensor) -> list[Patch]:
        """Patches of the view's consecutive elements ``values`` [n]; the first one is number ``start``."""
        return [Patch(box, part) for box, part in boxes_of(self.shape, start, values)]

    def elements(self, boxes: Iterable[Box]) -> Iterator[tuple[int, int]]:
        """Number of the first and of the last element of each box of the view, counted in the view."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        yield from (_ends(box, strides, 0) for box in boxes)

    def elements_of_parameter(self, boxes: Iterable[Box]) -> Iterator[tuple[int, int]]:
        """Number of the first and of the last element of each box of the view, counted in the parameter."""
        yield from (_ends(box, self._strides, self._offset) for box in boxes)

    def boxes(self, box: Box) -> Iterator[Box]:
        """The boxes of the view whose elements lie in a box of the parameter."""
        along = [
            list(_within(axes, low - first, low - first + size))
            for axes, first, low, size in zip(self._axes, self._first, *box, strict=True)
        ]
        dims = [axis.dim for axes in self._axes for axis in axes]
        for found in product(*along):
            ranges = dict(zip(dims, (one for of_dim in found for one in of_dim), strict=True))
            every = [ranges.get(dim, (0, 1)) for dim in range(len(self.shape))]
            yield tuple(low for low, _ in every), tuple(size for _, size in every)

    def _strided(self, part: Box, box: Box, values: torch.Tensor) -> torch.Tensor:
        """A box of the view in the memory of a box of the parameter that has all of it."""
        steps, offset = [0] * len(self.shape), values.storage_offset()
        for axes, first, low, step in zip(self._axes, self._first, box[0], values.stride(), strict=True):
            index = first - low
            for axis in axes:
                index += part[0][axis.dim] * axis.step
                steps[axis.dim] = axis.step * step
            offset += index * step
        return values.as_strided(part[1], steps, offset)


def boxes_of(shape: tuple[int, ...], start: int, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of consecutive elements ``values`` [n] of a row-major array; the first one is number ``start``."""
    parts, first = [], 0
    for box in flat_boxes(shape, start, start + len(values)):
        count = prod(box[1])
        parts.append((box, values[first : first + count].view(box[1])))
        first += count
    return parts


def _ends(box: Box, strides: Sequence[int], offset: int) -> tuple[int, int]:
    first = offset + sum(low * stride for low, stride in zip(box[0], strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(box[1], strides, strict=True))


def _within(axes: Sequence[_Axis], low: int, high: int) -> Iterator[tuple[_Range, ...]]:
    """The boxes of indices whose places along one dim of the parameter are in [low, high), the first place being 0."""
    if not axes:
        if low <= 0 < high:
            yield ()
        return
    size, step, inner = axes[0].size, axes[0].step, axes[1:]
    reach = sum((axis.size - 1) * axis.step for axis in inner)  # of the places of one index; less than a step
    first, stop = max(0, -(-(low - reach) // step)), min(size, -(-high // step))  # those with a place inside
    whole, past = max(first, -(-low // step)), min(stop, (high - 1 - reach) // step + 1)  # those with no place outside
    for index in range(first, min(whole, stop)):
        yield from _at(index, inner, low - index * step, high - index * step)
    if whole < past:
        yield (whole, past - whole), *((0, axis.size) for axis in inner)
    for index in range(max(past, whole), stop):
        yield from _at(index, inner, low - index * step, high - index * step)


def _at(index: int, inner: Sequence[_Axis], low: int, high: int) -> Iterator[tuple[_Range, ...]]:
    yield from (((index, 1), *ranges) for ranges in _within(inner, low, high))


def common_parts(sources: Iterable[Patch], targets: Sequence[Patch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements that both have: (where they go, where they are), of one shape each."""
    for source in sources:
        for target in targets:
            if (common := overlap(source.box, target.box)) is not None:
                yield box_view(target.values, common, target.box[0]), box_view(source.values, common, source.box[0])
