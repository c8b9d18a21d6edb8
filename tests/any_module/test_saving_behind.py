"""An engine that saves behind the training writes what standing still would have written, whatever follows."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, read_manifest, read_tensors, room, verify_checkpoint
from gptpar.checkpoint.data_file import DataFile
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.errors import CheckpointError, GptparError
from gptpar.system.snapshot import Snapshot
from tests.any_module import checkpointed
from tests.any_module.checkpointed import assert_same, state, train
from tests.any_module.matrix import Bench
from tests.any_module.zoo import Mlp

CLIENT = {"epoch": 3, "words": ["any"]}
NARROW = {"precision": "bf16"}


class Watched(Mlp):
    """A buffer that each forward pass changes, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(300))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def make(layout: str = "ZeRO-0", *, behind: bool, **more: Any) -> ModuleEngine:
    torch.manual_seed(0)
    return checkpointed.make(Watched(), layout, gptpar={"async_save": behind}, **more)


@contextmanager
def slow_disk(seconds: float) -> Iterator[threading.Event]:
    """Each write waits for the event, at most so long."""
    write, gate = DataFile.write, threading.Event()

    def slowly(self: DataFile, place: int, data: memoryview) -> None:
        gate.wait(seconds)
        write(self, place, data)

    DataFile.write = slowly  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        DataFile.write = write  # type: ignore[method-assign]


@pytest.fixture
def nothing_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is about to be overwritten is copied, and only if the one who overwrites asks for it."""
    monkeypatch.setattr(Snapshot, "copy_ahead", lambda self: None)


@contextmanager
def host_room(num_bytes: int) -> Iterator[None]:
    real = room.host_room
    room.host_room = lambda held=0: num_bytes
    try:
        yield
    finally:
        room.host_room = real


def overwrite_all(engine: ModuleEngine) -> None:
    """What a user may do right after a save: change parameters in place, frozen ones too, and buffers; then train."""
    with engine.gathered(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.25)
    engine.module.calls -= 5
    train(engine, 3, 6)


def save(folder: Path, layout: str, more: dict[str, Any], behind: bool) -> dict[str, torch.Tensor]:
    """Train, save and overwrite; the state in the end."""
    engine = make(layout, behind=behind, **more)
    train(engine, 0, 3)
    with slow_disk(30 if behind else 0) as gate:
        path = Path(engine.save_checkpoint(folder, client_state=CLIENT))
        assert path.exists() != behind
        overwrite_all(engine)
        assert path.exists() != behind
        gate.set()
        engine.wait_for_checkpoint()
        assert path.exists() and (folder / "latest").read_text() == "global_step3"
    found = state(engine)
    engine.close()
    return found


def compare(rank: int, folder: Path, layouts: list[str], more: dict[str, Any]) -> None:
    with host_room(1 << 30):
        for layout in layouts:
            paths = [folder / f"{layout} {kind}" for kind in ("still", "behind")]
            assert_same(save(paths[0], layout, more, False), save(paths[1], layout, more, True))
            still, behind = (path / "iter_0000003" for path in paths)
            assert verify_checkpoint(behind) == [] and read_manifest(behind).meta == read_manifest(still).meta
            assert_same(read_tensors(behind), read_tensors(still))


def test_it_is_the_state_of_its_moment(bench: Bench, tmp_path: Path) -> None:
    bench.on_ranks(2, compare, tmp_path, ["ZeRO-0", "ZeRO-1, CPU 1", "ZeRO-3"], {})
    bench.on_ranks(2, compare, tmp_path, ["ZeRO-0, CPU 0.6", "ZeRO-2, CPU 0.6", "ZeRO-3, CPU 1"], NARROW)


@pytest.mark.fast
@pytest.mark.parametrize("layout", ["ZeRO-0", "ZeRO-3, CPU 0.6"])
@pytest.mark.usefixtures("nothing_is_copied_ahead")
def test_one_process_without_others_saves_the_state_of_its_moment(tmp_path: Path, layout: str) -> None:
    compare(0, tmp_path, [layout], {})


def without_room(rank: int, folder: Path) -> None:
    with host_room(0), slow_disk(0.005):
        for layout in ("ZeRO-0", "ZeRO-3, CPU 0.6"):
            engine, other = make(layout, behind=True), make(layout, behind=False)
            for one in (engine, other):
                train(one, 0, 3)
            path = Path(engine.save_checkpoint(folder / layout, client_state=CLIENT))
            assert path.exists()  # nobody would keep the buffers' bytes, so it stood still
            overwrite_all(engine)
            still = other.save_checkpoint(folder / f"still {layout}", client_state=CLIENT)
            assert_same(read_tensors(path), read_tensors(still))
            engine.close()
            other.close()


def test_without_room_for_what_users_overwrite_it_stands_still(bench: Bench, tmp_path: Path) -> None:
    bench.on_ranks(2, without_room, tmp_path)


def test_the_next_save_a_load_and_close_wait_for_it(tmp_path: Path) -> None:
    engine = make(behind=True)
    with host_room(1 << 30), slow_disk(0.1):
        train(engine, 0, 1)
        first = engine.save_checkpoint(tmp_path)
        client = {"steps": [1]}
        second = engine.save_checkpoint(tmp_path, tag="other", client_state=client)
        client["steps"].append(2)  # it was kept as it was
        assert Path(first).exists() and not Path(second).exists()
        train(engine, 1, 3)
        path, found = engine.load_checkpoint(tmp_path)
        assert (path, found) == (second, {"steps": [1]}) and engine.global_steps == 1
        third = engine.save_checkpoint(tmp_path, tag="other")
        engine.close()
    assert [str(path) for _, path in find_checkpoints(tmp_path)] == [third, first]  # it replaced that of its tag


def refuse(*_: object) -> None:
    raise CheckpointError("cannot write there: No space left on device")


def test_a_failure_is_told_and_forgiven_and_close_raises_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "host_room", lambda held=0: 1 << 30)
    engine = make(behind=True)
    train(engine, 0, 1)
    with monkeypatch.context() as broken:
        broken.setattr(DataFile, "write", refuse)
        engine.save_checkpoint(tmp_path)
        assert engine._saver.under_way is not None and engine._saver.under_way.wait(20)
        train(engine, 1, 2)
    assert "WARNING: the save of iteration 1 to" in capsys.readouterr().err
    path = Path(engine.save_checkpoint(tmp_path))
    train(engine, 2, 3)
    engine.wait_for_checkpoint()
    monkeypatch.setattr(DataFile, "write", refuse)
    engine.save_checkpoint(tmp_path)
    assert [found for _, found in find_checkpoints(tmp_path)] == [path]
    with pytest.raises(
        CheckpointError, match=r"No space left on device(.|\n)*3, is not on the disk: the steps since iteration 2"
    ):
        engine.close()
    assert engine.module(torch.ones(2, 16)).isfinite().all()  # it has its weights back
    with pytest.raises(GptparError, match="closed"):
        engine.save_checkpoint(tmp_path)


SCRIPT = """
import atexit, sys, threading, time
atexit.register(lambda: print([one.name for one in threading.enumerate()]))
from gptpar.checkpoint.data_file import DataFile
from tests.any_module.test_saving_behind import make, train
write = DataFile.write
DataFile.write = lambda *words: (time.sleep(0.3), write(*words))
engine = make("ZeRO-3, CPU 0.6", behind=True)
train(engine, 0, 3)
assert any(one.name == "gptpar-cpu-adam" for one in threading.enumerate())
for tag in ("first", "same", "same"):
    engine.save_checkpoint(sys.argv[1], tag=tag)
print("ends", flush=True)
"""


def test_a_script_that_ends_without_close_leaves_a_whole_checkpoint_and_no_thread(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n['MainThread']\n", "")
    names = {path.name: read_manifest(path).meta["tag"] for _, path in find_checkpoints(tmp_path)}
    assert names == {"iter_0000003": "first", "iter_0000005": "same"}
    assert (tmp_path / "latest").read_text() == "same" and not list(tmp_path.glob("*.tmp-*"))
    assert verify_checkpoint(tmp_path / "iter_0000005") == []


def test_engines_of_one_program_save_into_one_folder(tmp_path: Path) -> None:
    """The second save waits for the first, whose unfinished files it must not take for those of a dead save."""
    engines = {tag: make(behind=True) for tag in ("generator", "critic")}
    with slow_disk(0.2):
        for tag, engine in engines.items():
            train(engine, 0, 1)
            engine.save_checkpoint(tmp_path, tag=tag)
        for engine in engines.values():
            engine.wait_for_checkpoint()
    saved = {read_manifest(path).meta["tag"]: path for _, path in find_checkpoints(tmp_path)}
    assert saved.keys() == engines.keys() and not any(verify_checkpoint(path) for path in saved.values())
    for engine in engines.values():
        engine.close()
