"""What every test gets: the same random numbers, a tier, and no GPU test without a GPU; and what many tests use.

torch is imported where it is needed: the process that hands tests to others imports this file, and needs none.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import pytest_addoption, pytest_runtestloop  # noqa: F401

UNIT = Path(__file__).resolve().parent / "unit"


def pytest_configure(config: pytest.Config) -> None:
    """No process of the fast tier needs a model of transformers, whose import takes seconds."""
    from tests.forked import preload

    if config.option.markexpr != "fast":
        preload("transformers.models.gpt2.modeling_gpt2")


@pytest.fixture(autouse=True)
def _independent() -> Iterator[None]:
    """A test depends on no other: gptpar.initialize, for one, sets RANK and WORLD_SIZE in the environment."""
    from tests.spawn import seed_everything

    seed_everything()
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Returns what it is given, and closes that after the test."""
    with contextlib.ExitStack() as stack:

        def register(closable: Any) -> Any:
            stack.callback(closable.close)
            return closable

        yield register


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has no test of the tier need not be imported."""
    marks = {"fast": (None, "mark.fast"), "not fast and not long": ("mark.slow", None)}  # of unit tests, of others
    wanted = marks.get(config.option.markexpr, (None, None))[UNIT not in collection_path.parents]
    if wanted and collection_path.match("test_*.py") and wanted not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if UNIT in item.path.parents and "slow" not in item.keywords:
            item.add_marker(pytest.mark.fast)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


MANY_MODULES = 50
"""As many new ones make a collection over them longer than most tests."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """What a test imported late (torch's compiler, transformers) is no garbage either."""
    had = len(sys.modules)
    ran = yield
    if len(sys.modules) > had + MANY_MODULES:
        gc.collect()
        gc.freeze()
    return ran


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported is no garbage: an engine that closes looks for what is, in a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
