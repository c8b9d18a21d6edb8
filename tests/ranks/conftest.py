"""Processes that stay for all tests of a file: a new one computes its first step in several times a step's time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.spawn import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """A pool of as many processes as it is asked for."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(RankPool(size)))
