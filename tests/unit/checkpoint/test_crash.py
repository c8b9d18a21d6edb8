import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptpar.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from gptpar.checkpoint.folders import remove_dead_saves, temporary_path
from gptpar.errors import CheckpointError


def old_tensors(value: float = 10, size: int = 300_000) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((size,), float(value)) for i in range(4)}


def test_a_disk_that_is_or_becomes_full_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 10, old_tensors(), {})
    real, calls = os.pwrite, []

    def fill_up(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2], offset)  # short writes are legal and must be continued

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(CheckpointError, match=r"cannot write .*rank00000.bin: No space left on device"):
        save_checkpoint(tmp_path, 20, old_tensors(20), {})
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1024, f_frsize=4096))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match=r"iteration 20 needs 4\.6 MiB and .* has 4\.0 MiB free"):
        save_checkpoint(tmp_path, 20, old_tensors(20), {})
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert load_checkpoint(tmp_path, old_tensors(0)).iteration == 10


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_directories_that_cannot_be_synced_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.fsync

    def no_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", no_directories)
    if number == errno.EIO:  # but where the disk fails
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_checkpoint(tmp_path, 20, old_tensors(20), {})
    else:
        assert verify_checkpoint(save_checkpoint(tmp_path, 20, old_tensors(20), {})) == []


def test_a_failing_manifest_write_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_checkpoint(tmp_path, 10, old_tensors(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_whole_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 10, old_tensors(), {"seed": 1})
    written = (path / "rank00000.bin").stat()
    assert save_checkpoint(tmp_path, 10, old_tensors(), {"seed": 1}) == path
    assert (path / "rank00000.bin").stat().st_mtime_ns == written.st_mtime_ns
    for tensors, seed in ((old_tensors(), 2), ({"w0": torch.ones(3)}, 1)):
        with pytest.raises(CheckpointError, match="whole checkpoint with other contents"):
            save_checkpoint(tmp_path, 10, tensors, {"seed": seed})


def test_a_damaged_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 10, old_tensors(), {})
    (path / "rank00000.bin").write_bytes(b"")
    said: list[str] = []
    save_checkpoint(tmp_path, 10, old_tensors(11), {}, report=said.append)
    assert "iter_0000010.damaged-1" in said[-1] and (tmp_path / "iter_0000010.damaged-1").is_dir()
    load_checkpoint(tmp_path, targets := old_tensors(0))
    assert targets["w3"].unique().tolist() == [11.0]


def test_only_dead_saves_are_removed(tmp_path: Path) -> None:
    other_host = tmp_path / "iter_0000010.tmp-some-host-1-0a0a0a0a"
    idle = tmp_path / "iter_0000020.tmp-some-host-1-0b0b0b0b"
    own = temporary_path(tmp_path, 30)
    alive = Path(str(own).replace(f"-{os.getpid()}-", f"-{os.getppid()}-"))
    for path in (other_host, idle, own, alive, tmp_path / "notes.tmp-x"):
        path.mkdir()
    os.utime(idle, (0, 0))
    assert sorted(remove_dead_saves(tmp_path)) == sorted([idle, own])
    assert other_host.is_dir() and alive.is_dir() and (tmp_path / "notes.tmp-x").is_dir()
