"""Large index arrays on disk: built once, published atomically, mapped read-only by every rank of a node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Store = Callable[[str, np.ndarray], np.ndarray]
FINGERPRINT_BYTES = 1 << 16


def file_identity(path: Path) -> dict[str, Any]:
    """What tells a file from its replacement: size, modification time and a hash of its first and last 64
    KiB."""
    status = path.stat()
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(FINGERPRINT_BYTES))
        file.seek(max(status.st_size - FINGERPRINT_BYTES, 0))
        digest.update(file.read(FINGERPRINT_BYTES))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}


class IndexCache:
    """A folder of `<key>-<name>.npy` files.

    Any number of processes may ask for the same key at once. Where the file system has locks one of them
    builds and the others wait and map its files; where it has none each builds, and the last rename of equal
    files wins.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, identity: dict[str, Any], build: Callable[[Store], Arrays], names: tuple[str, ...]) -> Arrays:
        """The arrays of `identity`, from disk or from `build`.

        Args:
            identity: JSON values on which the arrays depend, all of them.
            build: makes the arrays, giving each to its argument as soon as it is complete and using what that
                returns instead, so that no more than one array is in memory.
            names: the arrays that `build` returns.

        A folder that cannot be written, or a full disk, costs a warning: the arrays then stay in memory.
        """
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        found = self._load(key, names)
        if found is None:
            with self._lock(key):
                found = self._load(key, names) or build(lambda name, values: self._store(key, name, values))
        return found

    def _path(self, key: str, name: str) -> Path:
        return self.folder / f"{key}-{name}.npy"

    def _load(self, key: str, names: tuple[str, ...]) -> Arrays | None:
        try:
            return {name: np.load(self._path(key, name), mmap_mode="r", allow_pickle=False) for name in names}
        except (
            OSError,
            ValueError,
            EOFError,
        ):  # not there, or cut short by a crash of the machine: build it again
            return None

    def _store(self, key: str, name: str, values: np.ndarray) -> np.ndarray:
        path = self._path(key, name)
        temp = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            with open(temp, "wb") as file:
                np.save(file, values, allow_pickle=False)
            os.replace(temp, path)
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            warnings.warn(
                f"cannot write the index cache {self.folder} ({error.strerror}), so this process keeps the indices in "
                "its own memory; give a writable folder with --data-cache-path",
                stacklevel=2,
            )
            return values
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no such folder to write, or no locks on this file system
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.folder / f"{key}.lock", "wb"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
