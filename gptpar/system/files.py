"""Reads files, and writes them atomically: neither a reader nor a crash sees half of one."""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from gptpar.system.processes import is_running

# Errors of FUSE and CIFS mounts, which cannot sync a directory.
_CANNOT_SYNC_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


MAX_TEXT_BYTES = 1 << 30
"""Far more than any manifest, log or proof has; a file with a hole may claim terabytes."""


MAX_SMALL_BYTES = 64 << 20
"""More than any configuration or tokenizer has; parsed, JSON takes some twenty times its bytes."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, opened for reading. A pipe or a device, which might never end, is refused.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return file


def read_regular(path: str | os.PathLike[str], most: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a regular file.

    Args:
        most: the largest number of bytes that it may hold.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it holds {size:,} bytes, and at most {most:,} are read", os.fspath(path))
        return file.read(most)


def facts_in(name: str, beside: str) -> dict[str, Any]:
    """The contents of one of the package's TOML files.

    Args:
        name: of the file.
        beside: path of a module in the same folder.
    """
    return tomllib.loads(Path(beside).with_name(name).read_text(encoding="utf-8"))


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, with all links followed, is in a folder.

    In Hugging Face's cache, ``models--OWNER--NAME/snapshots/COMMIT`` holds links to files of
    ``models--OWNER--NAME/blobs``, which count, too.
    """
    real, inside = path.resolve(), folder.resolve()
    cache = inside.parent.parent
    is_commit = re.fullmatch("[0-9a-f]{40}", inside.name) is not None and inside.parent.name == "snapshots"
    is_snapshot = is_commit and cache.name.startswith("models--")
    return real.is_relative_to(inside) or (is_snapshot and real.parent == cache / "blobs")


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """The name under which this process writes what will be ``path``; it contains the host and the process id."""
    path = Path(path)
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def remove_abandoned(path: str | os.PathLike[str]) -> list[str]:
    """Remove temporary files of ``path`` whose processes ran on this host and have ended; returns their names."""
    path = Path(path)
    named = re.compile(re.escape(f"{path.name}.{os.uname().nodename}.") + r"(\d+)\.tmp")
    removed = []
    with suppress(OSError):  # no such folder yet
        for name in sorted(os.listdir(path.parent)):
            found = named.fullmatch(name)
            if found and not is_running(int(found[1])):
                with suppress(OSError):  # another process was quicker, or it is not ours to remove
                    os.unlink(path.parent / name)
                    removed.append(name)
    return removed


def name_full_disk(error: OSError, path: str | os.PathLike[str]) -> None:
    """Give the error of a full disk, a full quota or a file that grew too large the name of the file.

    The system names the file that cannot be opened, but not the one that cannot be written.
    """
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        error.filename = os.fspath(path)


@contextmanager
def full_disk_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block that writes a file; see :func:`name_full_disk`."""
    try:
        yield
    except OSError as error:
        name_full_disk(error, path)
        raise


@contextmanager
def atomic_output(path: str | os.PathLike[str], temporary: Path | None = None) -> Iterator[IO[bytes]]:
    """A binary file that takes the name ``path`` when the block ends, and vanishes if the block raises.

    Args:
        temporary: its name until then, in the same folder (default: :func:`temporary_name`).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or temporary_name(path)
    try:
        with full_disk_named(path), open(temporary, "wb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_synced(path: Path, text: str) -> None:
    """Write a file atomically and return when it is on the disk."""
    with atomic_output(path, path.with_name(f".{path.name}.tmp")) as file:
        file.write(text.encode())


def write_synced(path: Path, text: str | bytes) -> None:
    """Write a file and return when it is on the disk."""
    with full_disk_named(path), open(path, "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        sync_file(file)


def sync_file(file: IO[bytes]) -> None:
    """Return when everything that was written to an open file is on the disk."""
    if file.writable():
        file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Return when the directory's entries are on the disk; does nothing on file systems that cannot sync them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_DIRECTORIES:
            raise
    finally:
        os.close(fd)
