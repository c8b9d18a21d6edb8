"""Objects of a run are out of reach of collections while it takes steps, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gptpar.system.garbage import NUM_STEPS, LongLived


@pytest.fixture(autouse=True)
def freezing_again() -> Iterator[None]:
    """The tests' own process may have frozen objects."""
    had = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if had:
        gc.freeze()


@pytest.mark.slow
def test_collections_look_at_younger_objects_alone() -> None:
    with pytest.raises(ZeroDivisionError), LongLived() as long_lived:
        for _ in range(NUM_STEPS):
            assert gc.get_freeze_count() == 0
            long_lived.after_step()
        assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
        long_lived.after_step()
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0 and len(gc.get_objects()) > 10_000
