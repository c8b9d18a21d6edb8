"""A snapshot gives the bytes of its moment, whatever is overwritten while it is read."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.system import snapshot as snapshot_module
from gptpar.system.regions import PIECE_BYTES, copy_bytes, sizes_of_copies
from gptpar.system.snapshot import Snapshot
from gptpar.system.spare_memory import SpareMemory
from gptpar.system.state_guard import StateGuard

PIECE = PIECE_BYTES // 4


def read(snapshot: Snapshot, tensor: torch.Tensor) -> bytes:
    """A tensor's row-major bytes, as the snapshot has them."""
    found = b""
    for piece in snapshot.pieces(tensor):
        target = torch.empty(piece.num_bytes, dtype=torch.uint8)
        snapshot.read(piece, partial(copy_bytes, target))
        found += target.numpy().tobytes()
    return found


def overwrite(snapshot: Snapshot, *tensors: torch.Tensor) -> None:
    snapshot.before_write(tensors)
    for tensor in tensors:
        tensor.fill_(-1)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def kinds() -> list[torch.Tensor]:
    """Views of one vector, as a flat optimizer's parameters are, and others."""
    flat = torch.randn(3 * PIECE + 1000)
    transposed = flat[2 * PIECE + 1000 :].view(-1, 4).t()
    return [flat[:7], flat[7 : 2 * PIECE + 500], transposed, torch.randn(40, 40)[::3, 1::2], torch.empty(0, 3)]


@pytest.mark.parametrize("written", ["one by one", "last first", "all at once"])
def test_what_is_overwritten_meanwhile_is_read_as_it_was(written: str) -> None:
    tensors = kinds()
    before = [bytes_of(tensor) for tensor in tensors]
    snapshot = Snapshot(tensors, room=64 << 20)
    if written == "all at once":
        overwrite(snapshot, *tensors)
    for tensor in tensors if written == "one by one" else reversed(tensors):
        overwrite(snapshot, tensor)
    assert [read(snapshot, tensor) for tensor in tensors] == before
    assert snapshot.most_kept >= sum(tensor.nbytes for tensor in tensors)


def test_what_is_added_later_is_read_as_it_was_then() -> None:
    first, later = torch.randn(PIECE + 3), torch.randn(2 * PIECE)
    before = bytes_of(first)
    snapshot = Snapshot([first], room=64 << 20, more=True)
    copying = in_thread(snapshot.copy_ahead)
    waiting = in_thread(snapshot.wait_until_held)
    overwrite(snapshot, first, later)  # of the second one nothing is kept yet
    waiting.join(0.2)
    assert waiting.is_alive() and copying.is_alive()
    snapshot.hold([later])
    waiting.join(60)
    assert not waiting.is_alive() and snapshot.needs(later) and not snapshot.needs(torch.zeros(3))
    overwriting = in_thread(overwrite, snapshot, later)
    overwriting.join(0.2)
    assert overwriting.is_alive() and copying.is_alive()
    snapshot.add([later])
    overwriting.join(60)
    copying.join(60)
    assert not overwriting.is_alive() and not copying.is_alive() and snapshot.waited_s > 0.3
    assert read(snapshot, first) == before and read(snapshot, later) == bytes_of(torch.full((2 * PIECE,), -1.0))


@pytest.mark.parametrize("num_needed", [0, PIECE])
def test_a_block_is_exchanged_before_it_is_known_what_is_needed_of_it(num_needed: int) -> None:
    block, free = torch.randint(0, 256, (2 * PIECE,), dtype=torch.uint8), torch.zeros(PIECE, dtype=torch.uint8)
    before, spare = bytes_of(block[:num_needed]), SpareMemory(1 << 30)
    snapshot = Snapshot([], room=64 << 20, more=True, spare=spare)
    snapshot.hold([block])
    assert snapshot.exchange(free) is None  # no byte of it is the snapshot's

    other = snapshot.exchange(block)
    assert other is not None and other.numel() == block.numel() and other.data_ptr() != block.data_ptr()
    assert snapshot.most_kept == block.numel() and snapshot.waited_s == 0
    needed = block[:num_needed]
    snapshot.add([needed] if num_needed else [], [block])

    assert not snapshot.needs(block) and snapshot.exchange(other) is None
    if num_needed:
        assert read(snapshot, needed) == before
    assert snapshot._room == 64 << 20 and spare.take(block.numel()).data_ptr() == block.data_ptr()


def test_a_save_that_ends_before_its_snapshot_is_complete_holds_up_nobody() -> None:
    guard, snapshot = StateGuard(), Snapshot([], more=True)
    guard.wait_until_held()  # there is no save
    guard.snapshot = snapshot
    waiting = in_thread(guard.wait_until_held)
    snapshot.close()
    waiting.join(60)
    assert not waiting.is_alive()
    snapshot.copy_ahead()


def test_without_room_overwriting_waits_for_the_reader_and_nothing_is_copied() -> None:
    tensor = torch.randn(3 * PIECE)
    before = bytes_of(tensor)
    snapshot = Snapshot([tensor])
    writer = in_thread(overwrite, snapshot, tensor)
    writer.join(0.05)
    assert writer.is_alive() and bytes_of(tensor) == before
    assert read(snapshot, tensor) == before
    writer.join(10)
    assert bytes_of(tensor) != before and snapshot.most_kept == 0 and snapshot.waited_s >= 0.04


@pytest.mark.parametrize("num_copiers", [1, 3])
def test_copies_made_ahead_never_take_more_than_the_room(num_copiers: int) -> None:
    tensors = [torch.randn(PIECE) for _ in range(6)]
    before = [bytes_of(tensor) for tensor in tensors]
    snapshot = Snapshot(tensors, room=2 * PIECE_BYTES + 1)
    copiers = [in_thread(snapshot.copy_ahead) for _ in range(num_copiers)]
    writer = in_thread(overwrite, snapshot, *tensors)
    assert [read(snapshot, tensor) for tensor in tensors] == before
    for thread in (*copiers, writer):
        thread.join(10)
        assert not thread.is_alive()
    assert 0 < snapshot.most_kept <= 2 * PIECE_BYTES


def test_many_readers_copiers_and_writers_at_once() -> None:
    for _ in range(20):
        tensors = [torch.randn(2000) for _ in range(40)]
        before = [bytes_of(tensor) for tensor in tensors]
        snapshot, found = Snapshot(tensors, room=20 * 8000), [b""] * 40

        def read_some(
            first: int, snapshot: Snapshot = snapshot, tensors: Sequence[torch.Tensor] = tensors, found: list = found
        ) -> None:
            for number in range(first, 40, 2):
                found[number] = read(snapshot, tensors[number])

        threads = [in_thread(read_some, first) for first in range(2)]
        threads += [in_thread(overwrite, snapshot, *tensors[part::2]) for part in range(2)]
        threads += [in_thread(snapshot.copy_ahead) for _ in range(2)]
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert found == before


def parts_of_a_block() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A block of memory, and tensors that lie in it with gaps; the first one is several pieces."""
    block = torch.randint(0, 256, (3 * PIECE_BYTES,), dtype=torch.uint8)
    vector = block.view(torch.float32)
    return block, [vector[: PIECE + 10], vector[PIECE + 20 : 2 * PIECE], vector[2 * PIECE : -7]]


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_block_that_was_exchanged_is_read_where_it_is(num_read: int) -> None:
    block, tensors = parts_of_a_block()
    before = [bytes_of(tensor) for tensor in tensors]
    spare, room = SpareMemory(1 << 30), 4 * PIECE_BYTES
    snapshot = Snapshot(tensors, room=room, spare=spare, exchanged=[block])
    found = [read(snapshot, tensor) for tensor in tensors[:num_read]]
    snapshot.copy_ahead()  # there is nothing to copy
    assert snapshot.most_kept == 0 and snapshot.needs(block)
    other = snapshot.exchange(block)
    assert other is not None and other.shape == block.shape and other.data_ptr() != block.data_ptr()
    other.zero_()
    assert snapshot.most_kept == block.numel() and snapshot.waited_s == 0
    assert not snapshot.needs(block) and snapshot.exchange(block) is None
    assert found + [read(snapshot, tensor) for tensor in tensors[num_read:]] == before
    assert snapshot._room == room and spare.take(block.numel()).data_ptr() == block.data_ptr()


def test_prepared_memory_is_what_snapshots_take() -> None:
    """Two snapshots of the same tensors, all overwritten: the prepared blocks serve both, bytes as they stood."""
    tensors = [torch.randn(PIECE + 5), torch.arange(12.0).view(3, 4).t(), torch.ones(3)]
    sizes = list(sizes_of_copies(tensors))
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    spare = SpareMemory(limit=sum(sizes))
    spare.prepare([*sizes, 1]).join()
    assert spare.num_bytes == sum(sizes)
    for value in (7.0, 8.0):
        before = [bytes_of(tensor) for tensor in tensors]
        snapshot = Snapshot(tensors, room=sum(sizes), spare=spare)
        snapshot.before_write(tensors)
        for tensor in tensors:
            tensor.fill_(value)
        assert snapshot.most_kept == spare.num_bytes == sum(sizes)
        assert [read(snapshot, tensor) for tensor in tensors] == before
        snapshot.close()


def test_overwriting_that_waits_for_a_hung_disk_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "STILL_SECONDS", 0.2)
    tensor = torch.zeros(8)
    with pytest.raises(CheckpointError, match="file system does not answer, and memory has no room"):
        Snapshot([tensor], room=0).before_write([tensor])
