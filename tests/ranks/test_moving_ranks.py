"""Files that processes send each other: all bytes, in blocks, and an error of one is everyone's."""

import errno
import os
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import moving
from gptpar.checkpoint.moving import move_files
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.ring import Move
from gptpar.errors import CheckpointError
from tests.spawn import spawn

SIZES = {"a": 1, "b": 1000, "c": 1001, "d": 12_345}


def content(name: str) -> bytes:
    generator = torch.Generator().manual_seed(ord(name))
    return bytes(torch.randint(0, 256, (SIZES[name],), dtype=torch.uint8, generator=generator).tolist())


def moved(rank: int, root: Path) -> None:
    moving.BLOCK_BYTES = 1000
    ranks, folder = Ranks(None), root / f"{rank}"
    folder.mkdir()
    for name in SIZES:
        if rank == ord(name) % 3:
            (folder / name).write_bytes(content(name))
    moves = [
        Move(ord(name) % 3, target, name, SIZES[name])
        for target in range(3)
        for name in SIZES
        if target != ord(name) % 3
    ]
    move_files(ranks, moves, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: content(name) for name in SIZES}
    move_files(ranks, [], folder)


def failing(rank: int, root: Path) -> None:
    moving.BLOCK_BYTES = 1000
    ranks, folder = Ranks(None), root / f"{rank}"
    folder.mkdir()
    around = [Move(rank, (rank + 1) % 3, f"of{rank}", 5000) for rank in range(3)]
    (folder / f"of{rank}").write_bytes(bytes(5000) if rank else bytes(1500))
    with pytest.raises(CheckpointError, match=r"0/of0: it ends at byte 1,500 of 5,000"):
        move_files(ranks, around, folder)
    assert [path.name for path in folder.iterdir()] == [f"of{rank}"]
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder / f"of{rank}").write_bytes(bytes(5000))
    if rank == 2:
        os.pwrite = full
    with pytest.raises(CheckpointError, match=r"2/of1\..*: No space left on device"):
        move_files(ranks, around, folder)
    os.pwrite = real
    assert [path.name for path in folder.iterdir()] == [f"of{rank}"]
    move_files(ranks, around, folder)
    assert all((folder / f"of{one}").read_bytes() == bytes(5000) for one in (rank, (rank - 1) % 3))


def both(rank: int, root: Path) -> None:
    moved(rank, root / "moved")
    failing(rank, root / "failing")


def test_files_arrive_and_errors_are_told(tmp_path: Path) -> None:
    for name in ("moved", "failing"):
        (tmp_path / name).mkdir()
    spawn(both, 3, tmp_path)
