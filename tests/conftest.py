"""What every test gets: the same random numbers, and no GPU test without a GPU; and what many tests use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.spawn import seed_everything


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed_everything()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Returns what it is given, and closes that after the test."""
    with contextlib.ExitStack() as stack:

        def register(closable: Any) -> Any:
            stack.callback(closable.close)
            return closable

        yield register


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
