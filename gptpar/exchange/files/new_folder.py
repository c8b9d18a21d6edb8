"""Writes a new folder that appears whole, under its final name, or not at all: for conversions and exports."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptpar.errors import CheckpointError
from gptpar.system.files import sync_directory


def why_not_new(folder: Path) -> str | None:
    """Why the folder cannot be made; ``None`` if it can, or if it is there and empty."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}."
    return f"{folder} is there already, and nothing is overwritten: choose another folder."


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the final one, which takes its name when the block ends without an error.

    Raises:
        CheckpointError: the folder exists and is not empty, or the system refuses.
    """
    if problem := why_not_new(folder):
        raise CheckpointError(problem)
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_directory(temporary)
        with suppress(FileNotFoundError):
            folder.rmdir()
        temporary.rename(folder)
        sync_directory(folder.parent)
    except OSError as error:
        cause = f"{error.filename}: {error.strerror}" if _is_elsewhere(error, temporary, folder) else error.strerror
        raise CheckpointError(f"{folder} cannot be written: {cause or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_elsewhere(error: OSError, temporary: Path, folder: Path) -> bool:
    """Whether an error names a file that is not in the new folder, and no folder above it."""
    if not isinstance(error.filename, str | Path):
        return False
    named = Path(error.filename).absolute()
    return not named.is_relative_to(temporary) and named != folder and not temporary.is_relative_to(named)
