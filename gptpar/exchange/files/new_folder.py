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
        named = str(error.filename or folder).replace(str(temporary), str(folder))
        place = "" if named == str(folder) else f"{named}: "
        raise CheckpointError(f"{folder} cannot be written: {place}{error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
