"""Makes the launcher's folders, one of them in this machine's memory, and removes them after the run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gptpar.system.processes import Process

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gptpar-mirror-"
KEPT_PREFIX = "gptpar-kept-"
OWNER = "owner.json"
UNNAMED_SECONDS = 60.0
"""Age at which a folder without an owner counts as abandoned: its launcher died while it made the folder."""


@contextlib.contextmanager
def folder_in_memory(root: Path = SHARED_MEMORY) -> Iterator[Path | None]:
    """The folder for copies of the state (:func:`owned_folder`); ``None`` if the system has no such place."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(owned_folder(root, PREFIX))
        except OSError:
            yield None
            return
        yield folder


@contextlib.contextmanager
def owned_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder that only this user can open, removed at the end; those of launchers that were killed go first.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(root, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        (folder / OWNER).write_text(json.dumps(Process.this().to_dict()))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_newest(folder: Path) -> str | None:
    """Move a failed run's newest copy out of the folder, which will be removed: the disk may hold no newer checkpoint.

    Returns:
        A sentence that says where it is now; ``None``: there is no copy.
    """
    from gptpar.checkpoint.folders import find_checkpoints  # brings torch: a second, which every verb would pay for

    copies = find_checkpoints(folder)
    if not copies:
        return None
    iteration, newest = copies[0]
    kept = Path(tempfile.mkdtemp(prefix=KEPT_PREFIX, dir=folder.parent))
    newest.rename(kept / newest.name)
    return (
        f"the copy of iteration {iteration} in memory is kept: if no newer one is on the disk, go on from it with "
        f"--load {kept}; remove the folder when you no longer need it."
    )


def remove_abandoned(root: Path, prefix: str = PREFIX) -> None:
    """Remove this user's folders whose launchers have ended."""
    for folder in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another launcher was quicker
            if folder.is_dir() and folder.stat().st_uid == os.getuid() and _is_abandoned(folder):
                shutil.rmtree(folder)


def _is_abandoned(folder: Path) -> bool:
    try:
        owner = Process.from_dict(json.loads((folder / OWNER).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return time.time() - folder.stat().st_mtime > UNNAMED_SECONDS
    return owner.is_local() and not owner.is_alive()
