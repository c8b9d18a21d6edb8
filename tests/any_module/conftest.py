"""Processes that a file's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.any_module.matrix import Bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Pools of ranks with the engine that is proved."""
    with Bench() as bench:
        yield bench
