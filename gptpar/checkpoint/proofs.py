"""Remembers what a re-read of a checkpoint found, in a file beside the checkpoint.

    root/.verified/iter_0000010.json    when every byte was read, and the damage that was found

A proof holds for the files that were read: one of another size or modification time has not been proved.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gptpar.checkpoint.folders import files_of
from gptpar.checkpoint.manifest import DamagedCheckpoint, read_manifest
from gptpar.checkpoint.verify import damaged_files
from gptpar.system.files import read_regular, replace_synced

FOLDER_NAME = ".verified"


@dataclass(frozen=True)
class Proof:
    """A re-read of every byte.

    Attributes:
        seconds: when, since the epoch.
        problems: the damage found, a sentence each; none if the checkpoint was whole.
    """

    seconds: float
    problems: tuple[str, ...]


def remember(path: Path, problems: list[str]) -> None:
    """Note that every byte of the checkpoint was just read. Where the folder cannot be written, nothing is noted."""
    with contextlib.suppress(OSError):
        note = {"seconds": time.time(), "problems": problems, "files": _files(path)}
        _note(path).parent.mkdir(exist_ok=True)
        replace_synced(_note(path), json.dumps(note))


def recall(path: Path) -> Proof | None:
    """The last re-read of the checkpoint; None if there was none, or its files changed since."""
    try:
        note = json.loads(read_regular(_note(path)))
        if note["files"] != _files(path):
            return None
        return Proof(float(note["seconds"]), tuple(map(str, note["problems"])))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def known_problems(iteration: int, path: Path) -> list[str]:
    """Damage that the manifest and the files' sizes show, or else what the last re-read found."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return [str(error)]
    if manifest.iteration != iteration:
        return [f"{path} says of itself that it is iteration {manifest.iteration}"]
    proof = recall(path)
    return damaged_files(path, manifest) or ([] if proof is None else list(proof.problems))


def forget(path: Path) -> None:
    """Drop the note of a checkpoint that is deleted."""
    with contextlib.suppress(OSError):  # it is no proof of another checkpoint: the files' times differ
        _note(path).unlink()


def move(path: Path, to: Path) -> None:
    """Let the note follow a checkpoint that was moved to `to`."""
    with contextlib.suppress(OSError):  # a lost note costs another re-read
        if _note(path).exists():
            _note(to).parent.mkdir(exist_ok=True)
            os.rename(_note(path), _note(to))


def _note(path: Path) -> Path:
    return path.parent / FOLDER_NAME / f"{path.name}.json"


def _files(path: Path) -> dict[str, list[int]]:
    """Name -> [bytes, modification time in ns] of every file of the checkpoint."""
    stats = {str(file.relative_to(path)): file.stat() for file in files_of(path)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
