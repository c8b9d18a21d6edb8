"""``gptpar runs``: what a run folder holds, told without changing it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli import main
from gptpar.run.run_folder.branches import leave_branch
from gptpar.run.run_folder.owner import Owner

Show = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints 2 and 4, and a branch from 4 with 6 and 8."""
    root = tmp_path / "my run"
    for number in (2, 4, 6, 8):
        save_checkpoint(root, number, {"w": torch.full((8,), float(number))}, {})
    leave_branch(root, 4, 8, None, lambda _: None)
    return root


@pytest.fixture
def show(root: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    def run(flags: str = "", expect: int = 0) -> str:
        status = main(["runs", str(root), *flags.split()])
        captured = capsys.readouterr()
        assert status == expect, captured.err
        return captured.out

    return run


def test_checkpoints_branches_and_how_to_go_on(root: Path, show: Show) -> None:
    lines = show().splitlines()
    assert lines[0] == f"{root}: no run writes here"
    assert [line.split()[0] for line in lines[2:4]] == ["4", "2"]
    assert all(line.endswith("whole by manifest and sizes") and " B  whole" in line for line in lines[2:4])
    assert lines[4] == "branch 1-from-0000004, left by going back to iteration 4"
    assert [line.split()[0] for line in lines[6:8]] == ["8", "6"]
    branch = f"'{root}/branches/1-from-0000004'"
    assert lines[8:] == [f"  to go on from there: --load {branch} --save {branch}"]


def test_a_re_read_is_remembered_until_a_file_changes(root: Path, show: Show) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("iter_*/**")}
    assert show("--verify").count("whole (every byte re-read 20") == 4
    assert {path: path.stat().st_mtime_ns for path in root.rglob("iter_*/**")} == before
    assert show().count("whole (every byte re-read 20") == 4
    file = root / "iter_0000004" / "rank00000.bin"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    assert show().count("whole (every byte re-read 20") == 3 and show().count("whole by manifest and sizes") == 1
    assert "DAMAGED (every byte re-read 20" in show("--verify", expect=1)
    found = json.loads(show("--json", expect=1))
    assert [checkpoint["state"] for checkpoint in found["checkpoints"]] == ["damaged", "whole"]
    assert "tensor 'w'" in found["checkpoints"][0]["problems"][0]
    leave_branch(root, 2, 4, None, lambda _: None)
    assert "DAMAGED (every byte re-read 20" in show(expect=1)  # the note has moved with the checkpoint


def test_damage_left_overs_and_owners(root: Path, show: Show, closing: Callable[[Any], Any]) -> None:
    closing(Owner(root, print))
    Owner(root / "branches" / "1-from-0000004", print)
    claim = root / "branches" / "1-from-0000004" / "owner-1.json"
    values = json.loads(claim.read_text())
    values["process"] |= {"host": "node7\x1b[2J", "pid": 12}
    claim.write_text(json.dumps(values))
    os.utime(claim, (0, 0))
    (root / "iter_0000002" / "rank00000.bin").write_bytes(b"")
    (root / "iter_0000006.tmp-some-host-1-0a0a0a0a").mkdir()
    os.utime(root / "iter_0000006.tmp-some-host-1-0a0a0a0a", (0, 0))
    (root / "iter_0000006.damaged-1").mkdir()
    text = show(expect=1)
    assert f"{root}: a run writes here (host " in text and f"process {os.getpid()}" in text
    assert "left by a run that has ended (host node7\\x1b[2J, process 12" in text and "\x1b" not in text
    assert "iter_0000006.tmp-some-host-1-0a0a0a0a: left by a save that died" in text
    assert "iter_0000006.damaged-1: damaged; renamed because that iteration was saved again" in text
    assert "DAMAGED\n" in text and "ends at byte 0 of 32" in text
    found = json.loads(show("--json", expect=1))
    assert found["owner"]["alive"] and not found["branches"][0]["owner"]["alive"]
    assert found["branches"][0]["from_iteration"] == 4 and len(found["branches"][0]["checkpoints"]) == 2
