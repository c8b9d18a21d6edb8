"""What every test gets: the same random numbers, and no GPU test without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.spawn import seed_everything


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed_everything()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
