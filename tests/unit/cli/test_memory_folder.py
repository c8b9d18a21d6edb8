"""The folder in memory: private, gone with its run, and cleared away after a launcher that was killed."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.launch.memory import OWNER, PREFIX, UNNAMED_SECONDS, remove_abandoned
from gptpar.system.processes import Process


def test_a_copy_outlives_a_killed_launcher_until_the_disk_has_a_newer_state(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder, save = tmp_path / f"{PREFIX}dead", tmp_path / "run"
    owner = {**replace(Process.this(), pid=ended.pid).to_dict(), "started_in": str(tmp_path)}
    for iteration in (10, 20):
        save_checkpoint(folder, iteration, {}, {"config": {"checkpoint": {"save": "run"}}})
    (folder / OWNER).write_text(json.dumps(owner))
    for newest in (None, 19):
        if newest is not None:
            (save / f"iter_{newest:07d}").mkdir(parents=True)
        said: list[str] = []
        remove_abandoned(tmp_path, say=said.append)
        assert folder.exists() and len(said) == 1 and "copy of iteration 20 in memory" in said[0], newest
    (save / "iter_0000020").mkdir()
    remove_abandoned(tmp_path, say=said.append)
    assert not folder.exists() and len(said) == 1


def test_only_what_a_dead_launcher_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    this = Process.this()
    owners = {
        "dead": replace(this, pid=ended.pid),
        "alive": this,
        "reused": replace(this, started="1"),
        "elsewhere": replace(this, pid=ended.pid, host="another"),
        "other-container": replace(this, pid=ended.pid, namespace="pid:[1]"),
    }
    for name, owner in owners.items():
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / OWNER).write_text(json.dumps(owner.to_dict()))
    for name in ("being-made", "never-made"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    os.utime(tmp_path / f"{PREFIX}never-made", (0, (tmp_path.stat().st_mtime - UNNAMED_SECONDS - 5)))
    (tmp_path / "gptpar-else").mkdir()
    remove_abandoned(tmp_path)
    left = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()}
    assert left == {"alive", "elsewhere", "other-container", "being-made", "gptpar-else"}
