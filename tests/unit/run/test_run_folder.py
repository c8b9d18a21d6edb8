"""One run at a time writes into a folder; ``gptpar runs`` tells what a folder holds, and changes nothing."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing as closed_after
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, save_checkpoint
from gptpar.cli import main
from gptpar.errors import CheckpointError
from gptpar.run.run_folder import owner
from gptpar.run.run_folder.branches import leave_branch
from gptpar.run.run_folder.owner import Owner, current_claim

Closing = Callable[[Owner], Owner]


def silent(sentence: str) -> None:
    pass


def edit(root: Path, *, silent_seconds: float = 0, **process: object) -> None:
    """Change what the claim says of its process, and when it gave the last sign of life."""
    (path,) = root.glob("owner-*.json")
    values = json.loads(path.read_text())
    values["process"] |= process
    path.write_text(json.dumps(values | {"token": "another"}))
    os.utime(path, (time.time() - silent_seconds,) * 2)


def leave_dead(root: Path) -> int:
    """A child takes the folder and dies with it; returns its number (nobody has asked for its status yet)."""
    child = os.fork()
    if child == 0:
        Owner(root, silent)
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return child


def test_a_second_run_is_refused_with_what_to_do(tmp_path: Path, closing: Closing) -> None:
    closing(Owner(tmp_path, silent))
    message = (
        rf"{tmp_path} is in use: another run writes there \(host .*, process {os.getpid()}, since 20.*, last sign of "
        rf"life [0-3] s ago\)\. Wait .* choose another --save; .* delete {tmp_path}/owner-1\.json"
    )
    with pytest.raises(CheckpointError, match=message):
        Owner(tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["owner-1.json"]


def test_the_end_gives_the_folder_back_and_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with closed_after(Owner(tmp_path / "a" / "b", silent)):
            assert (tmp_path / "a" / "b" / "owner-1.json").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    Owner(tmp_path / "mine", silent).close()
    assert (tmp_path / "mine").is_dir()  # it was there before


def test_a_killed_run_is_followed_at_once_on_the_same_machine(tmp_path: Path, closing: Closing) -> None:
    child, said = leave_dead(tmp_path), []
    assert not (claim := current_claim(tmp_path)).process.is_alive()  # type: ignore[union-attr]
    closing(Owner(tmp_path, said.append))
    os.waitpid(child, 0)
    assert len(said) == 1 and f"process {child}" in said[0] and "has ended" in said[0] and claim is not None
    assert [path.name for path in tmp_path.iterdir()] == ["owner-2.json"]


def test_another_machine_is_judged_by_its_signs_of_life(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    Owner(tmp_path, silent)
    said: list[str] = []

    def meanwhile(*silent_seconds: float) -> None:
        """What is seen of the other run after each wait."""
        coming = iter(silent_seconds)
        monkeypatch.setattr(time, "sleep", lambda _: edit(tmp_path, host="elsewhere", silent_seconds=next(coming)))

    edit(tmp_path, host="elsewhere", silent_seconds=40)
    meanwhile(42, 44, 1)  # it lives
    with pytest.raises(CheckpointError, match="is in use.*host elsewhere.*last sign of life [12] s ago"):
        Owner(tmp_path, said.append)
    for silence in (0, 100):
        edit(tmp_path, host="elsewhere", silent_seconds=silence)
        meanwhile(silence + 1, 170, 181)
        closing(Owner(tmp_path, said.append))
    told = [re.findall(r"silent for (\d+) s: waiting for up to (\d+) s", sentence) for sentence in said]
    assert told == [[("40", "140")], [("0", "180")], [], [("100", "80")], []]
    assert "was left by a run that has ended (host elsewhere" in said[-1]


@pytest.mark.slow
def test_of_many_that_start_together_one_owns_the_folder(tmp_path: Path) -> None:
    os.waitpid(leave_dead(tmp_path), 0)
    start, alive, (tried, done) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            for _, writing in (start, alive):
                os.close(writing)
            code = 2
            try:
                os.read(start[0], 1)  # until all are there
                Owner(tmp_path, silent)
                code = 0
            except CheckpointError:
                code = 1
            finally:
                os.write(done, b".")
                os.read(alive[0], 1)  # until all others have tried
                os._exit(code)
        children.append(child)
    os.close(start[1])
    for _ in children:
        os.read(tried, 1)
    os.close(alive[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, 1, 1, 1, 1, 1]


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Owner]:
    with closed_after(Owner(tmp_path, silent)) as mine:
        yield mine


def save(root: Path, iteration: int, mine: Owner | None = None, keep: int | None = None) -> None:
    permit = None if mine is None else mine.require
    save_checkpoint(root, iteration, {"w": torch.full((9,), float(iteration))}, {}, keep=keep, permit=permit)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_folder_that_was_lost_is_left_alone(tmp_path: Path, owned: Owner, leaves: bool) -> None:
    save(tmp_path, 10, owned)
    (tmp_path / "owner-1.json").unlink()
    other = Owner(tmp_path, silent)
    save(tmp_path, 20, other)
    if leaves:
        other.close()
    with pytest.raises(CheckpointError, match=r"was taken by another run .* writes and deletes nothing there"):
        save(tmp_path, 15, owned, keep=1)
    assert [number for number, _ in find_checkpoints(tmp_path)] == [20, 10] and not list(tmp_path.glob("*.tmp-*"))
    owned.close()
    assert (tmp_path / "owner-1.json").exists() == (not leaves)  # the other's stays
    other.close()


def test_a_folder_lost_during_a_save_is_not_published_into(
    tmp_path: Path, owned: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def taken_meanwhile(*arguments: object) -> int:
        edit(tmp_path, host="elsewhere")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", taken_meanwhile)
    with pytest.raises(CheckpointError, match="was taken by another run.*host elsewhere"):
        save(tmp_path, 10, owned)
    assert [path.name for path in tmp_path.iterdir()] == ["owner-1.json"]


def test_signs_of_life_are_given_and_only_to_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "SIGN_OF_LIFE_SECONDS", 0.02)
    with closed_after(Owner(tmp_path, silent)):
        os.utime(tmp_path / "owner-1.json", (0, 0))
        give_up = time.monotonic() + 60
        while (tmp_path / "owner-1.json").stat().st_mtime == 0 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert abs((tmp_path / "owner-1.json").stat().st_mtime - time.time()) < 60
        edit(tmp_path, host="elsewhere", silent_seconds=1000)
        time.sleep(0.1)
        assert time.time() - (tmp_path / "owner-1.json").stat().st_mtime > 900


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
