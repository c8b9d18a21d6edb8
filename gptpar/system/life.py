"""Whether workers still live: they note what they do, or read and write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from gptpar.system.activity import records

COUNTED_BYTES = 2**20
"""Bytes that count as a sign: a thread that looks at a small file now and then is no progress."""


class SignsOfLife:
    """Follows the notes of all workers of a folder, and the bytes that they read and write."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._notes: dict[int, bytes] = {}
        self._bytes: dict[int, int] = {}
        self._last = time.monotonic()

    def silence(self, processes: Iterable[int]) -> float:
        """Seconds since any of them showed a sign, as far as this method was called often enough to see it."""
        notes, moved = records(self._folder), {process: bytes_moved(process) for process in processes}
        grown = any(count - self._bytes.get(process, 0) >= COUNTED_BYTES for process, count in moved.items())
        if notes != self._notes or grown:
            self._notes, self._bytes, self._last = notes, moved, time.monotonic()
        return time.monotonic() - self._last


def bytes_moved(process: int) -> int:
    """What Linux counts of a process's reading and writing; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
