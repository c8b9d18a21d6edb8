"""The names of a run's checkpoint folders: finding, publishing and removing them, and which saves are dead.

    root/iter_0000010/manifest.json, rank00000.bin   a whole checkpoint; appears by one rename
    root/iter_0000020.tmp-<host>-<pid>-<random>/     a save in progress, or one that died
    root/iter_0000010.damaged-1/                     a damaged one that a later save moved aside
    root/latest_checkpointed_iteration.txt           Megatron's marker, written as a hint

Checkpoints are found by listing the folder; the marker is never trusted to exist.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from itertools import count
from pathlib import Path

from gptpar.system.files import read_regular, replace_synced, sync_directory
from gptpar.system.processes import is_running

HINT_NAME = "latest_checkpointed_iteration.txt"
DEAD_AFTER_SECONDS = 600

PUBLISHED = re.compile(r"iter_(\d{7,})")
"""The name of a published checkpoint's folder; the group is its iteration."""

_MOVED_ASIDE = re.compile(r"iter_\d{7,}\.damaged-\d+")
_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")


def checkpoint_path(root: Path, iteration: int) -> Path:
    """root/iter_0000010, Megatron's name."""
    return root / f"iter_{iteration:07d}"


def find_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """(iteration, path) of every published checkpoint, newest first, by scanning; damaged ones included."""
    try:
        entries = [path for path in Path(root).iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), path) for path in entries if (match := PUBLISHED.fullmatch(path.name))]
    return sorted(found, reverse=True)


def files_of(path: Path) -> list[Path]:
    """Every file of a checkpoint, those in its subfolders included."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def latest(root: str | Path) -> Path | None:
    """The newest published checkpoint, whole or not; None if there is none."""
    return next((path for _, path in find_checkpoints(root)), None)


def temporary_path(root: Path, iteration: int) -> Path:
    """A new name for a save in progress, with the host and the process that own it."""
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return root / f"{checkpoint_path(root, iteration).name}.tmp-{owner}"


def find_temporaries(root: Path) -> list[tuple[Path, bool]]:
    """(path, dead) of every save that is in progress or was left behind.

    A save is dead when its process is gone (same host) or it has written nothing for ten minutes (any host).
    """
    matches = [(path, match) for path in sorted(root.iterdir()) if (match := _TEMPORARY.fullmatch(path.name))]
    return [
        (path, _owner_gone(match["host"], int(match["pid"])) or _idle_seconds(path) > DEAD_AFTER_SECONDS)
        for path, match in matches
    ]


def find_damaged(root: Path) -> list[Path]:
    """Damaged checkpoints that saves moved aside."""
    return [path for path in sorted(root.iterdir()) if _MOVED_ASIDE.fullmatch(path.name)]


def remove_dead_saves(root: Path) -> list[Path]:
    """Delete what saves that died left behind; returns what was deleted."""
    dead = [path for path, is_dead in find_temporaries(root) if is_dead]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return dead


def publish(temporary: Path, final: Path) -> None:
    """Make a finished save visible under its final name, all at once and for good."""
    sync_directory(temporary)
    os.rename(temporary, final)
    sync_directory(final.parent)


def move_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that its name is free and it can still be examined."""
    aside = next(
        candidate for number in count(1) if not (candidate := path.with_name(f"{path.name}.damaged-{number}")).exists()
    )
    os.rename(path, aside)
    return aside


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so its final name never points to a partial checkpoint."""
    doomed = temporary_path(path.parent, int(path.name.removeprefix("iter_")))
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_hint(root: Path, iteration: int) -> None:
    """Point Megatron's marker file at `iteration`, atomically."""
    replace_synced(root / HINT_NAME, str(iteration))


def edited_hint(root: str | Path) -> int | None:
    """The iteration that somebody wrote into the marker file to go back to; None if it is as the last save left it.

    If a save dies between publishing and writing the marker, the marker is older than the newest checkpoint. Such a
    marker does not count as edited.
    """
    hint, found = Path(root) / HINT_NAME, find_checkpoints(root)
    try:
        named = int(read_regular(hint))
        if not found or named == found[0][0] or named not in dict(found):
            return None
        return named if hint.stat().st_mtime_ns > found[0][1].stat().st_mtime_ns else None
    except (OSError, ValueError):
        return None


def _owner_gone(host: str, pid: int) -> bool:
    if host != socket.gethostname():
        return False
    if pid == os.getpid():  # this process saves one checkpoint at a time, so that one is over
        return True
    return not is_running(pid)


def _idle_seconds(path: Path) -> float:
    try:
        newest = max(entry.stat().st_mtime for entry in [path, *path.iterdir()])
    except OSError:
        return 0.0
    return time.time() - newest
