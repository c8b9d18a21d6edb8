"""The boxes of a global tensor that a process holds, with tensor parallelism and sharded optimizer state.

A box is a rectangular part of a global tensor. Any range of a row-major array consists of a few boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes), one number per dim


@dataclass(frozen=True)
class TensorParts:
    """The boxes of a global tensor that this process holds.

    Attributes:
        shape: of the global tensor.
        parts: (offsets in the global tensor, live view with the box's shape) of each box; empty if it holds none.
        dtype: of the global tensor, known even if this process holds no box.

    Raises:
        ValueError: a box lies outside the global tensor, or has another dtype.
    """

    shape: torch.Size
    parts: tuple[tuple[tuple[int, ...], torch.Tensor], ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for offsets, part in self.parts:
            if part.dtype != self.dtype:
                raise ValueError(f"a part is {part.dtype} and its tensor {self.dtype}")
            same_dims = len(offsets) == part.dim() == len(self.shape)
            if not same_dims or any(
                o < 0 or o + n > m for o, n, m in zip(offsets, part.shape, self.shape, strict=True)
            ):
                raise ValueError(f"a part {list(part.shape)} at {list(offsets)} is not inside {list(self.shape)}")

    @property
    def num_held(self) -> int:
        """Number of elements that this process holds."""
        return sum(part.numel() for _, part in self.parts)

    def fill(self, values: torch.Tensor, first: int = 0) -> None:
        """Copy this process's elements out of the global tensor, or out of consecutive rows of it.

        Args:
            values: the tensor or the rows, on any device, in any dtype.
            first: number of the first row.
        """
        origin = (first, *(0 for _ in self.shape[1:]))[: values.dim()]
        with torch.no_grad():
            for offsets, part in self.parts:
                box = overlap((offsets, tuple(part.shape)), (origin, tuple(values.shape)))
                if box is not None:
                    box_view(part, box, offsets).copy_(box_view(values, box, origin))


def whole(tensor: torch.Tensor) -> TensorParts:
    """A tensor that this process holds whole, as one box."""
    return TensorParts(tensor.shape, (((0,) * tensor.dim(), tensor),), tensor.dtype)


def as_parts(tensor: torch.Tensor | TensorParts) -> TensorParts:
    """A tensor as :class:`TensorParts`: a plain tensor is held whole."""
    return whole(tensor) if isinstance(tensor, torch.Tensor) else tensor


def tensors_of(held: Iterable[TensorParts]) -> list[torch.Tensor]:
    """This process's parts of several tensors, in their order."""
    return [part for one in held for _, part in one.parts]


def named(kinds: Mapping[str, Mapping[str, TensorParts]]) -> dict[str, TensorParts]:
    """The tensors of a checkpoint by name: ``KIND/NAME``, such as ``weights/NAME`` or ``exp_avg/NAME``.

    Args:
        kinds: kind of tensors -> a parameter's, buffer's or entry's name -> its parts.
    """
    return {f"{kind}/{name}": parts for kind, of_kind in kinds.items() for name, parts in of_kind.items()}


def kind_of(name: str) -> str:
    """The kind of a checkpoint's tensor."""
    return name.partition("/")[0]


def joined(tensors: Mapping[str, TensorParts], more: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
    """The parts of both, one parameter of the optimizer after the other: all of ``STATE/NAME`` for one ``NAME``.

    That is the order in which steps overwrite them.
    """
    found = dict(tensors)
    for name, one in more.items():
        before = found.get(name)
        found[name] = one if before is None else TensorParts(one.shape, before.parts + one.parts, one.dtype)
    place: dict[str, int] = {}
    for name in found:
        place.setdefault(name.partition("/")[2], len(place))
    return dict(sorted(found.items(), key=lambda item: place[item[0].partition("/")[2]]))


def views_of_flat(
    local_shape: Sequence[int],
    offsets: Sequence[int],
    start: int,
    stop: int,
    flat: torch.Tensor,
    order: Sequence[int] | None = None,
) -> tuple[tuple[tuple[int, ...], torch.Tensor], ...]:
    """The parts (:class:`TensorParts`) of a global tensor whose elements a range of a flat buffer holds.

    Args:
        local_shape, offsets: the box (a tensor-parallel rank's part, say) whose elements are flattened.
        start, stop: which of the box's elements `flat` holds; start == stop: none.
        flat: [stop - start], a view of the buffer.
        order: the box's dims in the order in which they are flattened, the last one fastest; default: row-major.

    Raises:
        ValueError: `flat` is not of that length, or the range does not fit.
    """
    if not 0 <= start <= stop <= prod(local_shape) or flat.shape != (stop - start,):
        raise ValueError(f"{list(flat.shape)} elements for {start}..{stop} of a box {list(local_shape)}")
    order = range(len(local_shape)) if order is None else order
    boxes = _boxes_of_flat(tuple(local_shape), tuple(offsets), tuple(order), start, stop)
    values = flat.split([prod(sizes) for _, sizes, _ in boxes]) if boxes[1:] else (flat,)
    parts = zip(boxes, values, strict=False)
    return tuple((lows, part.view(sizes).permute(place_of)) for (lows, sizes, place_of), part in parts)


@lru_cache(maxsize=1 << 16)
def _boxes_of_flat(
    local_shape: tuple[int, ...], offsets: tuple[int, ...], order: tuple[int, ...], start: int, stop: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
    """(offsets in the global tensor, sizes as flattened, where each of its dims is among these) of each box.

    They are the same for all states of an optimizer, and at each save.
    """
    place_of = tuple(order.index(dim) for dim in range(len(local_shape)))
    return tuple(
        (tuple(lows[place] + at for place, at in zip(place_of, offsets, strict=True)), sizes, place_of)
        for lows, sizes in flat_boxes(tuple(local_shape[dim] for dim in order), start, stop)
    )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold exactly the elements [start, stop) of a row-major array, in order; at most 2 * dims of them."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        for offsets, sizes in flat_boxes(inner, head, tail if first == last else row):
            yield (first, *offsets), (1, *sizes)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if tail and first <= last:
        for offsets, sizes in flat_boxes(inner, 0, tail):
            yield (last, *offsets), (1, *sizes)


def box_view(tensor: torch.Tensor, box: Box, origin: tuple[int, ...]) -> torch.Tensor:
    """The part of `tensor` that `box` covers, if the tensor's first element lies at `origin` of the global tensor."""
    return tensor[tuple(slice(o - at, o - at + n) for o, n, at in zip(*box, origin, strict=True))]


def overlap(a: Box, b: Box) -> Box | None:
    """The box common to both, or None."""
    lows = tuple(map(max, a[0], b[0]))
    highs = [min(ao + an, bo + bn) for ao, an, bo, bn in zip(*a, *b, strict=True)]
    sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return (lows, sizes) if all(size > 0 for size in sizes) else None


def first_overlap(shape: Sequence[int], boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes with an element in common; ``None``: there are none.

    The boxes are taken in order along one dim, and each is compared with those alone that reach past its first index.
    Along that dim the boxes are shortest, compared with the tensor.
    """
    dim = min(range(len(shape)), key=lambda d: sum(sizes[d] for _, sizes in boxes) / max(shape[d], 1), default=0)
    reaching: list[Box] = []  # boxes that reach past the place where the next one begins
    for box in sorted(boxes, key=lambda box: box[0][dim:]):
        reaching = [other for other in reaching if other[0][dim] + other[1][dim] > box[0][dim]] if shape else reaching
        for other in reaching:
            if overlap(box, other) is not None:
                return other, box
        reaching.append(box)
    return None
