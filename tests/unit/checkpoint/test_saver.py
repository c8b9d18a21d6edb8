"""One process's saver: failures that are forgiven, and a wait that is interrupted."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint.background import SaveUnderWay
from gptpar.checkpoint.save_request import Save
from gptpar.checkpoint.saver import FORGIVEN, Saver
from gptpar.errors import CheckpointError
from gptpar.system.state_guard import StateGuard
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from gptpar.topology.tensor_parts import as_parts

HERE = torch.device("cpu")


def make() -> tuple[Saver, StateGuard, list[str]]:
    guard, said = StateGuard(), list[str]()
    return Saver(Topology(Mesh(), 0, HERE), guard, said.append), guard, said


def save_of(iteration: int, write: Callable[..., Path], **more: Any) -> Save:
    return Save(Path("run"), iteration, {"w": as_parts(torch.ones(3))}, write, **more)


def full(**_: Any) -> Path:
    raise CheckpointError("no space left")


def test_saves_that_training_does_not_need_may_keep_failing() -> None:
    saver, _, said = make()
    for iteration in range(FORGIVEN + 1):
        saver.begin(save_of(iteration, full, optional=True), behind=True)
        saver.finish()
    assert len(said) == FORGIVEN + 1 and "stops and waits" not in said[-1]


def test_after_an_interrupted_wait_the_next_save_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, guard, said = make()
    gate, wait = threading.Event(), SaveUnderWay.wait

    def slow(*, moved: Callable[[], None], **_: Any) -> Path:
        gate.wait(60)
        moved()
        return Path("run/never")

    def interrupted(self: SaveUnderWay, seconds: float | None = None) -> bool:
        monkeypatch.setattr(SaveUnderWay, "wait", wait)
        gate.set()
        raise KeyboardInterrupt

    saver.begin(save_of(1, slow), behind=True)
    monkeypatch.setattr(SaveUnderWay, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.finish()
    assert guard.snapshot is None and saver.under_way is None
    saver.poll()  # as the next step does
    saver.begin(save_of(2, lambda **_: Path("run/written")), behind=True)
    saver.finish()
    assert saver.newest(Path("run")) == 2 and not said
