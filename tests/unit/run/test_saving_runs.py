"""Whole runs that save behind the training: when, what they leave, signals meanwhile, and saves that fail."""

import os
import shutil
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from gptpar.checkpoint import newest_whole
from gptpar.checkpoint.data_file import DataFile
from gptpar.errors import CheckpointError, FolderTakenError, NotSavedError
from gptpar.exchange.exports import Exports
from gptpar.run import saving
from gptpar.run.run_folder.owner import Owner
from gptpar.run.saving import Target
from tests.unit.run.test_saving import done, make
from tests.unit.run.whole_runs import assert_same_tensors, iterations, losses, run


@pytest.mark.slow
def test_the_newest_of_two_folders_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    words = f"--save-interval 4 --save-local {local} --save-local-interval 1"
    run(shared, words)
    assert iterations(shared) == [4, 8] and iterations(local) == [6, 7]  # what is in --save is not saved twice
    newest, whole = shared / "iter_0000008", tmp_path / "whole"
    newest.rename(whole)
    assert newest_whole([shared, local]) == (7, local / "iter_0000007")
    capsys.readouterr()
    run(shared, f"{words} --load {shared}")
    assert f"loaded {local / 'iter_0000007'}" in capsys.readouterr().out
    assert_same_tensors(newest, whole)

    file = local / "iter_0000007" / "rank00000.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    shutil.rmtree(newest)
    run(shared, f"{words} --load {shared}")
    assert f"loaded {local / 'iter_0000006'}" in capsys.readouterr().out
    assert_same_tensors(newest, whole)


@pytest.mark.slow
def test_a_signal_while_a_save_is_under_way_finishes_it_and_saves_the_newer_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked = DataFile.write, []

    def slow(self: DataFile, place: int, data: memoryview) -> None:
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        saving.time.sleep(0.01)
        write(self, place, data)

    monkeypatch.setattr(DataFile, "write", slow)
    assert run(tmp_path, "--save-interval 2") == signal.SIGTERM
    saved = iterations(tmp_path)
    assert saved[0] == 2 and 2 <= saved[-1] < 8 and not list(tmp_path.glob("*.tmp-*"))


def test_only_what_may_delete_a_checkpoint_waits_for_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, wrote = threading.Event(), []

    def export(self: Exports, checkpoint: Path, target: Path) -> None:
        gate.wait(30)
        wrote.append(checkpoint.name)

    monkeypatch.setattr(Exports, "_run", export)
    trainer, behind, _ = make(tmp_path / "run", "--save-interval 1 --save-hf-interval 1")
    behind.begin(behind.targets[0], done(1), keep_all=True)
    behind.finish()
    behind.begin(Target(tmp_path / "memory", None, None, None, in_memory=True), done(2), keep_all=True)
    assert not wrote
    threading.Timer(0.2, gate.set).start()
    behind.begin(behind.targets[0], done(3), keep_all=True)
    assert wrote == ["iter_0000001"]
    behind.close()
    assert wrote == ["iter_0000001", "iter_0000003"]
    trainer.close()


def fail(monkeypatch: pytest.MonkeyPatch, failing: Iterable[int]) -> list[int]:
    """Let the next saves of these iterations fail, one for each time that it is named; returns what is left to fail."""
    write, left, failed, lock = DataFile.write, list(failing), set[str](), threading.Lock()

    def fill_up(self: DataFile, place: int, data: memoryview) -> None:
        name = self._path.parent.name  # each attempt has another one
        iteration = int(name.split("_")[1].split(".")[0])
        with lock:
            if name not in failed and iteration in left:
                left.remove(iteration)
                failed.add(name)
        if name in failed:
            raise CheckpointError(f"cannot write {self._path}: No space left on device")
        write(self, place, data)

    monkeypatch.setattr(DataFile, "write", fill_up)
    return left


@pytest.mark.slow
def test_one_failed_save_costs_a_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    run(whole, "--save-interval 2")
    for name, flags in (("behind", ""), ("standing", "--no-async-save")):
        folder, left = tmp_path / name, fail(monkeypatch, [4])
        capsys.readouterr()
        run(folder, f"--save-interval 2 {flags}")
        (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
        assert not left and told.startswith(f"WARNING: the save of iteration 4 to {folder} failed: cannot write ")
        assert "No space left on device. Older checkpoints are whole, and training goes on; the next save" in told
        assert iterations(folder) == [2, 6, 8] and not list(folder.glob("*.tmp-*"))
        assert_same_tensors(folder / "iter_0000008", whole / "iter_0000008")
        assert losses(folder) == losses(whole)


def test_a_run_whose_saves_keep_failing_ends_at_the_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = fail(monkeypatch, [4, 6, 8, 10])
    with pytest.raises(CheckpointError) as error:
        run(tmp_path, "--save-interval 2 --train-iters 20")
    assert left == [10] and iterations(tmp_path) == [2]
    assert newest_whole([tmp_path]) == (2, tmp_path / "iter_0000002")
    assert str(error.value).startswith("cannot write ")
    assert str(error.value).endswith("state, of iteration 8, is not on the disk: the steps since iteration 2 are lost.")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(told) == 2 and "ends if it fails too (2 saves in a row have failed)" in told[1]


def test_a_run_whose_last_save_fails_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, [8, 8])
    lost = "iteration 8, is not on the disk: no checkpoint of this run is on the disk"
    with pytest.raises(NotSavedError, match=lost):
        run(tmp_path, "--save-interval 8")
    assert iterations(tmp_path) == []


@pytest.mark.slow
def test_a_folder_of_another_run_is_not_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def taken(self: Owner) -> None:
        asked.append(None)
        if len(asked) > 4:
            raise FolderTakenError("taken by another run")

    monkeypatch.setattr(Owner, "require", taken)
    with pytest.raises(FolderTakenError, match="taken by another run"):
        run(tmp_path, "--save-interval 2")
    assert iterations(tmp_path) == [2]
