"""Host memory in huge pages."""

import gc
import mmap

import pytest

from gptpar.system import pages
from gptpar.system.host import peak_process_memory, process_memory


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
