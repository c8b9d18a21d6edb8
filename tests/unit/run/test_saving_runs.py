"""Whole runs that save behind the training: when they save, what they leave in two folders, and signals meanwhile."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from gptpar.checkpoint import newest_whole
from gptpar.checkpoint.data_file import DataFile
from gptpar.exchange.exports import Exports
from gptpar.run import saving
from gptpar.run.saving import Target
from tests.unit.run.test_saving import done, make
from tests.unit.run.whole_runs import assert_same_tensors, iterations, run


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
