"""Host memory that copies borrow and give back."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from gptpar.system.regions import PIECE_BYTES, copy_bytes, sizes_of_copies
from gptpar.system.snapshot import Snapshot
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


def test_prepared_memory_is_what_snapshots_take() -> None:
    """Two snapshots of the same tensors, all overwritten: the prepared blocks serve both, bytes as they stood."""
    tensors = [
        torch.arange(PIECE_BYTES // 4 + 5, dtype=torch.float32),
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(3),
    ]
    sizes = list(sizes_of_copies(tensors))
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    spare = SpareMemory(limit=sum(sizes))
    spare.prepare([*sizes, 1]).join()
    assert spare.num_bytes == sum(sizes)
    for value in (7.0, 8.0):
        stood = [tensor.contiguous().clone() for tensor in tensors]
        snapshot = Snapshot(tensors, room=sum(sizes), spare=spare)
        snapshot.before_write(tensors)
        for tensor in tensors:
            tensor.fill_(value)
        assert snapshot.most_kept == spare.num_bytes == sum(sizes)
        for tensor, before in zip(tensors, stood, strict=True):
            parts = [torch.empty(piece.num_bytes, dtype=torch.uint8) for piece in snapshot.pieces(tensor)]
            for piece, part in zip(snapshot.pieces(tensor), parts, strict=True):
                snapshot.read(piece, partial(copy_bytes, part))
            assert torch.equal(torch.cat(parts), before.view(-1).view(torch.uint8))
        snapshot.close()


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
