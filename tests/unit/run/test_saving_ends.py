"""What a save that is written behind the training does to exports."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gptpar.exchange.exports import Exports
from gptpar.run.saving import Target
from tests.unit.run.test_saving import done, make


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
