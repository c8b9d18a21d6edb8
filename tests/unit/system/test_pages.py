"""Host memory in huge pages."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from gptpar.system import pages
from gptpar.system.host import peak_process_memory, process_memory
from gptpar.system.pinned import PinnedMemory


def test_what_is_not_filled_takes_no_huge_page_and_all_is_given_back() -> None:
    """20 MiB and a page: 5 KiB more than asked would be a page too many, a whole huge page is 2 MiB too many."""
    before, size = process_memory(), 10 * pages.HUGE_BYTES + mmap.PAGESIZE
    if before is None:
        pytest.skip("the system does not tell a process' memory")
    data = pages.zeros(size)
    taken = process_memory() - before
    assert size <= taken + (1 << 20) and taken <= size + (1 << 20)
    del data
    gc.collect()
    assert process_memory() - before <= 1 << 20
    assert (peak_process_memory() or 0) >= before + taken - (1 << 20)


def test_locked_memory_is_unlocked_when_nobody_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses may be somebody else's afterwards, who could not lock them."""
    locked: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.append(address) or 0,
        cudaHostUnregister=locked.remove,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    kept, dropped, closed = (PinnedMemory(4096) for _ in range(3))
    assert len(locked) == 3
    del dropped
    closed.close()
    closed.close()
    assert locked == [kept.data.data_ptr()]
    kept.close()
    assert PinnedMemory(0).close() is None and not locked
