"""The matrix of layouts: 1, 2 and 4 processes x ZeRO 0 to 3 x share of the optimizer on the CPU."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.any_module.case import Case, Setup

T = TypeVar("T")
WORLDS, STAGES, RATIOS = (1, 2, 4), (0, 1, 2, 3), (0.0, 0.6, 1.0)


def every_layout(case: Case, like: Setup) -> Iterator[Setup]:
    """All 36, with one and two micro-batches a step in turns; ``like`` has clipping and the number of steps."""
    for index, (world, stage, ratio) in enumerate(itertools.product(WORLDS, STAGES, RATIOS)):
        turn = 1 + (index + index // 12) % 2
        yield fitting(case, replace(like, world=world, stage=stage, ratio=ratio, accumulation=turn))


def fitting(case: Case, setup: Setup) -> Setup:
    """A layout with as many micro-batches as the case needs.

    A case that is resumed is saved by the next layout: another number of processes, another stage and another share;
    all processes together have four micro-batches a step.
    """
    if not case.resumed:
        return replace(setup, accumulation=max(setup.accumulation, case.micro_batches))
    world, stage, ratio = _next(setup.world, WORLDS), _next(setup.stage, STAGES), _next(setup.ratio, RATIOS)
    total = WORLDS[-1]
    before = replace(setup, world=world, stage=stage, ratio=ratio, accumulation=total // world)
    return replace(setup, accumulation=total // setup.world, saved_by=before)


def _next(value: T, values: tuple[T, ...]) -> T:
    return values[(values.index(value) + 1) % len(values)]


def each_of(setups: Sequence[Setup]) -> pytest.MarkDecorator:
    """A test in each of these layouts."""
    return pytest.mark.parametrize("setup", setups, ids=named)


def covering(values: Iterable[Any], setups: Sequence[Setup]) -> list[Any]:
    """Parameters of a test: each value in the last layout, the sharpest one, each second one in another in turn."""
    others = itertools.cycle(setups[:-1])
    return [
        pytest.param(value, setup, id=f"{named(value)}-{named(setup)}")
        for number, value in enumerate(values)
        for setup in (*((next(others),) if number % 2 == 0 else ()), setups[-1])
    ]


def named(value: Any) -> str:
    """A value's name in the id of a test."""
    return str(getattr(value, "__name__", getattr(value, "name", value))).replace(", ", "-")
