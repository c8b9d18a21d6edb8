"""Caches large index arrays on disk: built once, published atomically, mapped read-only by every rank of a node.

Each array is a file ``<key>-<name>.npy``; ``<key>.json``, written last, has the CRC-32 of each. Every process that
opens the arrays reads them once to compare (100 million entries of 4 bytes: about 0.25 s). So damage, such as zeros
after a power loss, is found, and the arrays are built again; otherwise nobody would notice a wrong order of samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptpar.system.files import atomic_output, open_regular, read_regular, remove_abandoned

Arrays = dict[str, np.ndarray]
Store = Callable[[str, np.ndarray], np.ndarray]
Shapes = dict[str, tuple[int, np.dtype]]
FINGERPRINT_BYTES = 1 << 16
"""Bytes at a file's start, and at its end, that are hashed."""
LOCK_SECONDS = 600.0  # building a billion entries takes about a minute
LOCK_MESSAGE_SECONDS = 10.0
LOCK_POLL_SECONDS = 0.1


class DamagedIndex(Exception):
    """Files of the cache that are not as they were written."""


def file_and_ends(path: Path) -> tuple[os.stat_result, bytes]:
    """What the system says of a file, and its first and last 64 KiB."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        start = file.read(FINGERPRINT_BYTES)
        file.seek(max(status.st_size - FINGERPRINT_BYTES, 0))
        return status, start + file.read(FINGERPRINT_BYTES)


def file_identity(path: Path) -> dict[str, Any]:
    """Identifies a file and its version: size, modification time, and a hash of its first and last 64 KiB."""
    status, ends = file_and_ends(path)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": hashlib.sha256(ends).hexdigest()}


class IndexCache:
    """A folder of ``<key>-<name>.npy`` files and a ``<key>.json`` for each key.

    Any number of processes may ask for the same key at once. If the file system has locks, one process builds, and the
    others wait and map its files. If it has none, each builds equal files, and the last rename wins.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, identity: dict[str, Any], build: Callable[[Store], Arrays], shapes: Shapes) -> Arrays:
        """The arrays of ``identity``, from disk or from ``build``.

        If the folder cannot be written, or the disk is full, this warns, and the arrays stay in memory. If a file is
        damaged, this warns and builds it again.

        Args:
            identity: all values on which the arrays depend, for JSON.
            build: makes the arrays. It passes each to its argument as soon as the array is complete, and goes on with
                what that returns, so that at most one array is in memory.
            shapes: name -> (length, dtype) of each array that ``build`` returns.
        """
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        with contextlib.suppress(DamagedIndex):  # reported by the process that builds it again
            if found := self._load(key, shapes):
                return found
        with self._lock(key):
            try:
                if found := self._load(key, shapes):
                    return found
            except DamagedIndex as damage:
                warnings.warn(f"the index cache {self.folder} is damaged ({damage}): it is built again", stacklevel=2)
            return self._build(key, build)

    def _path(self, key: str, name: str) -> Path:
        return self.folder / f"{key}-{name}.npy"

    def _load(self, key: str, shapes: Shapes) -> Arrays | None:
        """The arrays, or None if there are none.

        Raises:
            DamagedIndex: the files are not as they were written.
        """
        try:
            sums = json.loads(read_regular(self.folder / f"{key}.json"))
        except OSError:
            return None
        except ValueError as error:
            raise DamagedIndex(f"{key}.json is not JSON") from error
        arrays = {}
        for name, (length, dtype) in shapes.items():
            path = self._path(key, name)
            try:
                if path.exists() and not path.is_file():
                    raise DamagedIndex(f"{path.name} is no regular file")
                found = np.load(path, mmap_mode="r", allow_pickle=False)
            except FileNotFoundError:
                return None
            except (OSError, ValueError, EOFError) as error:
                raise DamagedIndex(f"{path.name} cannot be read") from error
            if found.shape != (length,) or found.dtype != dtype:
                raise DamagedIndex(f"{path.name} holds {found.shape} {found.dtype}, {(length,)} {dtype} are needed")
            if not isinstance(sums, dict) or zlib.crc32(found.data) != sums.get(name):
                raise DamagedIndex(f"{path.name} is not as it was written, by its CRC-32")
            arrays[name] = found
        return arrays

    def _build(self, key: str, build: Callable[[Store], Arrays]) -> Arrays:
        sums: dict[str, int] = {}

        def store(name: str, values: np.ndarray) -> np.ndarray:
            sums[name] = zlib.crc32(values.data)
            return self._store(self._path(key, name), values)

        arrays = build(store)
        # If an array could not be stored, this cannot be stored either, or an array that it lists is missing.
        with contextlib.suppress(OSError), atomic_output(self.folder / f"{key}.json") as file:
            file.write(json.dumps(sums).encode())
        return arrays

    def _store(self, path: Path, values: np.ndarray) -> np.ndarray:
        remove_abandoned(path)
        try:
            with atomic_output(path) as file:
                _write_array(file, values)
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            warnings.warn(
                f"cannot write the index cache {self.folder} ({error.strerror or error}), so this process keeps the "
                "indices in its own memory; give a writable folder with --data-cache-path",
                stacklevel=2,
            )
            return values

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no such folder to write, or no locks on this file system
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.folder / f"{key}.lock", "wb"))
                _wait_for_lock(file)
            yield


def _write_array(file: IO[bytes], values: np.ndarray) -> None:
    """Save an array as np.save does, whose error on a full disk does not say that the disk is full."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
    file.write(values.data)


def _wait_for_lock(file: IO[bytes]) -> None:
    """Lock the file, or go on without a lock after LOCK_SECONDS: its holder may hang, perhaps on another machine.

    Raises:
        OSError: the file system has no locks.
    """
    start = time.monotonic()
    reported = False
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waited = time.monotonic() - start
        if waited > LOCK_SECONDS:
            warnings.warn(
                f"another process has held {file.name} for {LOCK_SECONDS:g} s: this one builds the index by itself",
                stacklevel=2,
            )
            return None
        if waited > LOCK_MESSAGE_SECONDS and not reported:
            reported = True
            warnings.warn(
                f"waiting up to {LOCK_SECONDS:g} s for the process that builds the index cache and holds {file.name}",
                stacklevel=2,
            )
        time.sleep(LOCK_POLL_SECONDS)
