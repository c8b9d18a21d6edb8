"""What a run sets for the whole process, collections and the switch interval, is set once and restored."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from gptpar import TwinFlowAdamW
from gptpar.offload.updating_thread import SWITCH_SECONDS
from gptpar.system.garbage import NUM_STEPS, LongLived
from gptpar.system.switch_interval import SHORT_SECONDS, SWITCH_INTERVAL


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


# --- Python's switch interval has one owner, whoever wants it short and in whatever order they are done -------------


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_restore_it_when_both_are_closed(first: int) -> None:
    before = sys.getswitchinterval()
    optimizers = [TwinFlowAdamW([torch.nn.Parameter(torch.ones(4))], offload_ratio=1.0) for _ in range(2)]
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    optimizers[first].close()
    optimizers[first].close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    optimizers[1 - first].close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_it_is_short_within_a_context_and_as_before_after_it() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), SWITCH_INTERVAL.short():
        assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS)
        raise ZeroDivisionError
    assert sys.getswitchinterval() == pytest.approx(before)
