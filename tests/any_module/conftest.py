"""Processes that all tests share: Python, transformers and references are there once."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.any_module.matrix import Bench


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """Pools of ranks with the engine that is proved."""
    with Bench() as bench:
        yield bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without transformers, its models are left out."""
    if importlib.util.find_spec("transformers") is None:
        for item in items:
            if any(family in item.name for family in ("gpt2", "llama")):
                item.add_marker(pytest.mark.skip(reason="needs transformers"))
