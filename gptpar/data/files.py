"""Writing a file so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """The name under which this process writes what will be `path`; it says whose it is, by host and process id."""
    path = Path(path)
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def remove_abandoned(path: str | os.PathLike[str]) -> list[str]:
    """Remove temporary files of `path` whose processes, on this host, are gone; returns their names."""
    path = Path(path)
    named = re.compile(re.escape(f"{path.name}.{os.uname().nodename}.") + r"(\d+)\.tmp")
    removed = []
    with suppress(OSError):  # no such folder yet
        for name in sorted(os.listdir(path.parent)):
            found = named.fullmatch(name)
            if found and not _is_running(int(found[1])):
                with suppress(OSError):  # another process was quicker, or it is not ours to remove
                    os.unlink(path.parent / name)
                    removed.append(name)
    return removed


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


@contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` when the block ends, and vanishes if the block raises."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
