"""No test leaves a thread of the CPU optimizer behind: the next tests of this process would share the cores with it."""

import threading
from collections.abc import Iterator

import pytest


def cpu_optimizers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gptpar-cpu-adam"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = cpu_optimizers()
    yield
    assert not cpu_optimizers() - before
