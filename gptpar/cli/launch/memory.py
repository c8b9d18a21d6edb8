"""Makes the launcher's folders, one of them in this machine's memory, and removes them when nobody needs them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gptpar.system.processes import Process
from gptpar.system.restart import MEMORY_VARIABLE

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gptpar-mirror-"
OWNER = "owner.json"
KEPT = "kept"
UNNAMED_SECONDS = 60.0
"""Age at which a folder without an owner counts as abandoned: its launcher died while it made the folder."""


@contextlib.contextmanager
def folder_in_memory(say: Callable[[str], None], root: Path = SHARED_MEMORY) -> Iterator[Path | None]:
    """A folder that only this user can open; ``None`` if the system has no such place.

    It is new, and removed at the end unless :func:`keep_copies` has been called; or the user names one, which stays.
    Folders of launchers that have ended are removed first. One that holds a copy of a state that is not on the disk yet
    stays, and is reported.
    """
    given = os.environ.get(MEMORY_VARIABLE)
    remove_abandoned(root, PREFIX, say, but=given)
    try:
        folder = Path(given or tempfile.mkdtemp(prefix=PREFIX, dir=root))
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        yield None
        return
    with _owned(folder, stays=bool(given)):
        yield folder


@contextlib.contextmanager
def owned_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder that only this user can open, removed at the end; those of launchers that were killed go first.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(root, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    with _owned(folder):
        yield folder


@contextlib.contextmanager
def _owned(folder: Path, *, stays: bool = False) -> Iterator[None]:
    (folder / OWNER).write_text(json.dumps({**Process.this().to_dict(), "started_in": os.getcwd()}))
    try:
        yield
    finally:
        if not stays and not (folder / KEPT).exists():
            shutil.rmtree(folder, ignore_errors=True)


def keep_copies(folder: Path, *, is_alone: bool) -> str | None:
    """Let the newest copies of a failed run outlive its launcher: the disk may hold no newer checkpoint.

    Args:
        is_alone: whether there is one machine. Of several, the newest copy may lack files: then the older is needed.

    Returns:
        A sentence that says where they are; ``None``: there is no copy.
    """
    from gptpar.checkpoint.folders import find_checkpoints, remove_checkpoint  # brings torch, which takes a second
    from gptpar.checkpoint.ring import COPIES

    copies = find_checkpoints(folder)
    if not copies:
        return None
    for _, path in copies[1 if is_alone else COPIES :]:
        remove_checkpoint(path)
    (folder / KEPT).touch()
    return f"the copy of iteration {copies[0][0]} in memory is kept{_go_on_from(folder)}"


def _go_on_from(folder: Path) -> str:
    return (
        f": if no newer checkpoint is on the disk, go on from it with {MEMORY_VARIABLE}={folder} before the same "
        f"command, and --load with the folder of --save (on one machine also with --load {folder}); remove the folder "
        "when you no longer need it."
    )


def remove_abandoned(
    root: Path, prefix: str = PREFIX, say: Callable[[str], None] = print, but: str | None = None
) -> None:
    """Remove this user's folders whose launchers have ended, unless a copy in them is newer than the disk's.

    Args:
        say: takes a sentence about each folder that stays for its copy.
        but: a folder that is about to be used again.
    """
    for folder in set(root.glob(f"{prefix}*")) - {Path(but or "")}:
        with contextlib.suppress(OSError):  # another launcher was quicker
            if folder.is_dir() and folder.stat().st_uid == os.getuid() and _is_abandoned(folder):
                if (iteration := _only_copy(folder)) is None:
                    shutil.rmtree(folder)
                else:
                    say(f"a run that has ended left a copy of iteration {iteration} in memory{_go_on_from(folder)}")


def _is_abandoned(folder: Path) -> bool:
    try:
        owner = Process.from_dict(json.loads((folder / OWNER).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return time.time() - folder.stat().st_mtime > UNNAMED_SECONDS
    return owner.is_local() and not owner.is_alive()


def _only_copy(folder: Path) -> int | None:
    """The newest copy's iteration, if the run's folder on the disk has neither this state nor a newer one."""
    if not any(folder.glob("iter_*")):
        return None
    from gptpar.checkpoint import DamagedCheckpoint, find_checkpoints, read_manifest

    for iteration, path in find_checkpoints(folder):
        with contextlib.suppress(DamagedCheckpoint, KeyError, TypeError, ValueError):
            started_in = json.loads((folder / OWNER).read_text())["started_in"]
            save = read_manifest(path).meta["config"]["checkpoint"]["save"]
            on_disk = find_checkpoints(Path(started_in, save)) if save else []
            return iteration if not on_disk or on_disk[0][0] < iteration else None
    return None
