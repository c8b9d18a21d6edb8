"""Host memory that copies borrow and give back."""

from itertools import pairwise
from pathlib import Path

from gptpar.system.regions import PIECE_BYTES
from gptpar.system.spare_memory import SpareMemory


def test_a_block_comes_back_where_its_size_fits() -> None:
    spare = SpareMemory(limit=300)
    first, second = spare.take(100), spare.take(200)
    addresses = first.data_ptr(), second.data_ptr()
    spare.give_back(first)
    spare.give_back(second)
    assert spare.num_bytes == 300
    assert (spare.take(100).data_ptr(), spare.take(200).data_ptr()) == addresses
    assert spare.take(100).data_ptr() not in addresses and spare.num_bytes == 400


def test_hundreds_of_gigabytes_take_few_mappings() -> None:
    """Linux allows a process 65,530 by default."""
    before = num_mappings()
    spare = SpareMemory(limit=1 << 40)
    blocks = [spare.take(PIECE_BYTES) for _ in range(512)]  # 4 GiB of addresses, none of them touched
    assert num_mappings() - before <= 2 * 4 * 4 + 4
    starts = sorted(block.data_ptr() for block in blocks)
    assert all(one + PIECE_BYTES <= other for one, other in pairwise(starts))
    for block in blocks:
        spare.give_back(block)
    assert {block.data_ptr() for block in [spare.take(PIECE_BYTES) for _ in range(512)]} == set(starts)


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
