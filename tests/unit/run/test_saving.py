"""A checkpoint that is written behind the training is the one that stands still meanwhile would have written."""

import functools
import hashlib
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gptpar.checkpoint import background, find_checkpoints, read_tensors, verify_checkpoint
from gptpar.checkpoint import room as memory
from gptpar.checkpoint.data_file import DataFile
from gptpar.offload.shared_state import SharedState
from gptpar.run.progress import Progress
from gptpar.run.saving import Saving
from gptpar.run.trainer import Trainer
from gptpar.system.regions import MemoryRegion
from gptpar.system.snapshot import Snapshot
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, config_words, hash_of, train
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import inputs_of

WORDS = {
    "fp16, dynamic loss scale": "--fp16 --initial-loss-scale 65536 --min-loss-scale 1",
    "half on the CPU, in place": f"--bf16 {OFFLOAD} 0.5 --offload-speculation off",
    "half on the CPU, speculating": f"--bf16 {OFFLOAD} 0.5 --offload-speculation on --clip-grad 1000",
    "all on the CPU, speculating": f"--bf16 {OFFLOAD} 1 --offload-speculation on --clip-grad 1000",
    "all on the CPU, speculations redone": f"--bf16 {OFFLOAD} 1 --offload-speculation on --clip-grad 0.9",
    "matrices": "--optimizer muon --bf16",
    "matrices, half on the CPU": f"--optimizer muon --bf16 {OFFLOAD} 0.5 --offload-speculation off",
}

HELD_SECONDS = 0.1


def make(folder: Path, words: str = "") -> tuple[Trainer, Saving, list[str]]:
    config = tiny_config(config_words(f"{words} --save {folder}"))
    trainer, said = make_trainer(config), []
    return trainer, Saving(trainer, inputs_of(config), said.append), said


def tensors_of(root: Path) -> dict[str, str]:
    """Name -> hash of each tensor of the newest checkpoint."""
    path = find_checkpoints(root)[0][1]
    assert verify_checkpoint(path) == []
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in sorted(read_tensors(path).items())}


@functools.cache
def standing_still(words: str) -> tuple[dict[str, str], str]:
    """What a save that stands still writes at iteration 3, and a hash of the state after 7 steps without saves."""
    with tempfile.TemporaryDirectory(prefix="gptpar-saving-") as folder:
        trainer, _, _ = make(Path(folder), words)
        train(trainer, 0, 3)
        saved_runs.save(trainer, done(3), inputs_of(trainer.config), keep=None)
        saved = tensors_of(Path(folder))
        trainer.close()
    other = make_trainer(trainer.config)
    train(other, 0, 7)
    state = hash_of(other)
    other.close()
    return saved, state


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    """Each write waits for the event, at most so long."""
    write, gate = DataFile.write, threading.Event()

    def slowly(self: DataFile, place: int, data: memoryview) -> None:
        gate.wait(seconds)
        write(self, place, data)

    monkeypatch.setattr(DataFile, "write", slowly)
    return gate


def count_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each part of the state that is copied."""
    copy, copied = Snapshot._copy, list[int]()

    def counted(self: Snapshot, region: MemoryRegion) -> None:
        copied.append(region.num_bytes)
        copy(self, region)

    monkeypatch.setattr(Snapshot, "_copy", counted)
    return copied


def back_off_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong speculation, all further steps of these tests are in place."""

    def note_expectation(self: SharedState, expected: object, taken: object) -> None:
        self.backs_off |= taken != expected

    monkeypatch.setattr(SharedState, "note_expectation", note_expectation)


def done(iteration: int) -> Progress:
    return Progress(iteration, consumed_samples=4 * iteration, scheduled_samples=4 * iteration)


FAST = "half on the CPU, in place"
"""Of the kinds of runs, the one for which the fast tier tries all that can happen at a save."""


def each(kinds: Iterable[str], moments: tuple[str, ...]) -> list[Any]:
    """(words, moment) of every kind and moment."""
    return [
        pytest.param(WORDS[kind], moment, id=f"{kind}-{moment}", marks=() if kind == FAST else pytest.mark.slow)
        for kind in kinds
        for moment in moments
    ]


@pytest.mark.parametrize(("words", "room"), each(WORDS, ("copied ahead", "copied by the step", "no room")))
def test_it_is_the_state_of_its_moment(words: str, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, state = standing_still(words)
    monkeypatch.setattr(memory, "host_room", lambda held=0: 0 if room == "no room" else 1 << 30)
    monkeypatch.setattr(background, "num_copiers", lambda: 2 if room == "copied ahead" else 0)
    back_off_for_long(monkeypatch)
    copied = count_copies(monkeypatch)
    trainer, behind, said = make(tmp_path, words)
    train(trainer, 0, 3)
    gate = slow_writes(monkeypatch, 0.01 if room == "no room" else 30)
    behind.begin(behind.targets[0], done(3), keep_all=False)
    save = behind._saver.under_way
    assert save is not None
    train(trainer, 3, 7)
    assert room == "no room" or not save.over
    gate.set()
    behind.finish()
    redone = "--clip-grad 0.9" in words
    assert (save.snapshot.most_kept == 0) == (room == "no room" or redone)  # these steps go to the double buffers
    if "--clip-grad" in words:
        assert trainer.host is not None
        assert (trainer.host.num_redone > 0, trainer.host.num_ahead > 0) == (redone, not redone)
    if f"{OFFLOAD} 1" in words:
        assert not copied  # state with a double buffer: the traffic would slow down the update
    assert tensors_of(tmp_path) == saved
    assert "successfully saved checkpoint at iteration       3" in said[-1] and "training stood" in said[-1]
    assert hash_of(trainer) == state  # saving changes nothing
    trainer.close()


def hold(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A method that does nothing before the event, or a minute later."""
    call, gate = getattr(owner, name), threading.Event()

    def held(*args: Any, **more: Any) -> Any:
        gate.wait(60)
        return call(*args, **more)

    monkeypatch.setattr(owner, name, held)
    return gate


def go_on_when_called(owner: object, name: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the event a moment after a method is called."""
    call = getattr(owner, name)

    def timed(*args: Any, **more: Any) -> Any:
        threading.Timer(HELD_SECONDS, gate.set).start()
        return call(*args, **more)

    monkeypatch.setattr(owner, name, timed)


ON_CPU = [kind for kind, words in WORDS.items() if OFFLOAD in words and "muon" not in words]
"""A step of matrices needs the momenta of the CPU: it never ends before the CPU has begun it."""


@pytest.mark.parametrize(
    ("words", "held"), each(ON_CPU, ("the last update", "the places of the state", "the parts of the state"))
)
def test_a_save_begins_before_the_cpu_has_done_the_step(
    words: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes that step's state, and no part of the next one's, whoever of the two is late."""
    saved, _ = standing_still(words)
    trainer, behind, _ = make(tmp_path, words)
    train(trainer, 0, 2)
    host = trainer.host
    assert host is not None
    host.finish()
    owner, name = {
        "the last update": (host._thread, "_take_step"),
        "the places of the state": (Snapshot, "hold"),
        "the parts of the state": (Snapshot, "add"),
    }[held]
    gate, written = hold(owner, name, monkeypatch), slow_writes(monkeypatch, 30)
    train(trainer, 2, 3)
    behind.begin(behind.targets[0], done(3), keep_all=False)
    save = behind._saver.under_way
    assert save is not None and behind._saver._stood_s < 10
    waiter, wait = {
        "the last update": (host, "_wait_for"),
        "the places of the state": (save.snapshot._is_held, "wait"),
        "the parts of the state": (save.snapshot._complete, "wait"),
    }[held]
    go_on_when_called(waiter, wait, gate, monkeypatch)
    train(trainer, 3, 4)
    assert save.snapshot._is_held.is_set() and not save.over  # the step was requested
    train(trainer, 4, 6)
    host.finish()
    waited = gate.is_set()
    if held == "the parts of the state" and "--clip-grad 1000" in words:
        assert not waited  # blocks are exchanged, whatever of them is needed
    else:
        assert waited or "--clip-grad 0.9" in words  # where speculations fail, no update may come back to a block held
    gate.set()
    if held != "the last update" and waited:
        assert HELD_SECONDS / 3 < save.snapshot.waited_s < 30  # it is told as time for which training stood
    train(trainer, 6, 7)
    written.set()
    behind.finish()
    trainer.close()
    assert tensors_of(tmp_path) == saved
