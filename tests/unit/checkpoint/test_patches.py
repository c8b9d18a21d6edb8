"""Copies between a parameter's boxes and a view's elements: the same as with both whole in memory."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from gptpar.checkpoint.patches import ParameterView, Patch, common_parts
from gptpar.system.strided_copy import copy_elements
from gptpar.topology.tensor_parts import box_view

VIEWS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": ((7, 5), lambda ours: ours),
    "one row": ((1, 6), lambda ours: ours),
    "one column": ((6, 1), lambda ours: ours.t()),
    "transposed": ((7, 5), lambda ours: ours.t()),
    "the second half": ((2, 4, 3), lambda ours: ours[1]),
    "queries of groups": ((30, 4), lambda ours: ours.view(3, -1, 2, 4)[:, 0:3]),
    "keys of groups": ((30, 4), lambda ours: ours.view(3, -1, 2, 4)[:, 3:4]),
    "a bias of values": ((30,), lambda ours: ours.view(3, -1, 2)[:, 4:5]),
    "all queries, keys, values": ((18, 5), lambda ours: ours.view(3, 3, 2, 5).transpose(0, 1).movedim(-1, 0)),
}


def cut(size: int, random: Random) -> list[tuple[int, int]]:
    """(start, length) of consecutive ranges."""
    places = sorted({0, size, *(random.randrange(size + 1) for _ in range(3))})
    return [(start, stop - start) for start, stop in zip(places, places[1:], strict=False)]


def boxes(shape: tuple[int, ...], random: Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        found = [((*lows, low), (*sizes, n)) for lows, sizes in found for low, n in cut(size, random)]
    return found


def copy_common(sources: list[Patch], targets: list[Patch]) -> int:
    """The number of elements that are copied."""
    parts = list(common_parts(sources, targets))
    copy_elements(parts)
    return sum(target.numel() for target, _ in parts)


@pytest.mark.parametrize("name", VIEWS)
def test_blocks_of_either_kind_make_up_the_other(name: str) -> None:
    shape, of = VIEWS[name]
    random, parameter = Random(0), torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    view, origin = ParameterView(shape, of), (0,) * len(shape)
    wanted = of(parameter).reshape(-1)
    elements, back = torch.full((wanted.numel(),), -1, dtype=torch.float64), torch.full(shape, -1.0)
    copied = [0, 0]
    for box in boxes(shape, random):
        source = box_view(parameter, box, origin).contiguous()
        target = box_view(back, box, origin)
        for start, length in cut(wanted.numel(), random):
            flat = view.of_elements(start, elements[start : start + length])
            copied[0] += copy_common(view.of_parameter(box, source), flat)
            flat = view.of_elements(start, wanted[start : start + length])
            copied[1] += copy_common(flat, view.of_parameter(box, target))
    assert copied == [wanted.numel()] * 2
    assert torch.equal(elements, wanted.double())
    assert torch.equal(of(back), of(parameter))
    assert int((back >= 0).sum()) == wanted.numel()  # nothing else was written
