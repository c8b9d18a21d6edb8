"""What every test gets: the same random numbers, a tier, and no GPU test without a GPU; and what many tests use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import seed_everything

UNIT = Path(__file__).resolve().parent / "unit"


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


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if UNIT in item.path.parents and "slow" not in item.keywords:
            item.add_marker(pytest.mark.fast)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
