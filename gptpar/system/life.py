"""Detects signs of life of workers: notes of activity, and the bytes that they read and write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from gptpar.system.activity import records

COUNTED_BYTES = 2**20
"""Fewer bytes are no sign of life: a thread that polls a small file reads them, too."""


class SignsOfLife:
    """Follows the notes of all workers of a folder, and the bytes that they read and write."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._notes: dict[int, bytes] = {}
        self._bytes: dict[int, int] = {}
        self._last = time.monotonic()

    def silence(self, processes: Iterable[int]) -> float:
        """Seconds since any of the processes showed a sign of life, as seen by the calls of this method."""
        notes, moved = records(self._folder), {process: bytes_moved(process) for process in processes}
        grown = any(count - self._bytes.get(process, 0) >= COUNTED_BYTES for process, count in moved.items())
        if notes != self._notes or grown:
            self._notes, self._bytes, self._last = notes, moved, time.monotonic()
        return time.monotonic() - self._last


def bytes_moved(process: int) -> int:
    """Bytes that a process has read and written, by Linux's count; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
