"""Measures this machine's bandwidths: in host memory, between host and GPU, between GPUs, and to a disk.

All rates are in bytes per second, the best of a few tries: what the machine can do, not what it does under load.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gptpar.system.pinned import PinnedMemory

TRIES = 3
"""Number of measurements, of which the fastest counts."""


def memory_copy(num_bytes: int) -> float:
    """The rate of copies within host memory, with torch's threads; bytes read and bytes written both count."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    return 2 * num_bytes / _shortest(lambda: target.copy_(source))


def host_to_device(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """(rate of copies from page-locked memory to the GPU, rate of copies back).

    Raises:
        GptparError: the system does not allow that much locked memory.
    """
    pinned = PinnedMemory(num_bytes)
    try:
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        to_device = _shortest(lambda: _finished(device, lambda: there.copy_(pinned.data, non_blocking=True)))
        to_host = _shortest(lambda: _finished(device, lambda: pinned.data.copy_(there, non_blocking=True)))
        return num_bytes / to_device, num_bytes / to_host
    finally:
        pinned.close()


def device_to_device(num_bytes: int, source: torch.device, target: torch.device) -> float:
    """The rate of a copy from one GPU to another."""
    here = torch.ones(num_bytes, dtype=torch.uint8, device=source)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=target)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return num_bytes / _shortest(copy)


def disk_write(num_bytes: int, folder: Path) -> float:
    """The rate of writing and syncing one file in a folder; the file is removed.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    block = os.urandom(min(num_bytes, 1 << 24))  # some file systems store zeros in no time
    handle, name = tempfile.mkstemp(prefix=".gptpar-doctor-", dir=folder)
    try:
        begun = time.perf_counter()
        with open(handle, "wb", buffering=0) as file:
            left = num_bytes
            while left > 0:
                left -= file.write(block[:left])
            os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - begun)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _finished(device: torch.device, copy: Callable[[], object]) -> None:
    copy()
    torch.cuda.synchronize(device)


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of a few calls; one call before them, which does not count, touches all memory."""
    work()
    found = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)
