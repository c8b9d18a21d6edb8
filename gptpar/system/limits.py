"""Reads the limits that the system sets this process: cores, memory of its control groups, locked memory."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from gptpar.system.host import cores, group_folders, of_system


def core_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups around this process grant it; ``None`` without such a limit.

    Args:
        root: root of the file system that is asked.
    """
    found = []
    for folder, is_v2 in group_folders(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if is_v2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # no limit is "max", which is no number, or -1 in version 1
                found.append(int(quota) / int(period))
    return min(found, default=None)


def usable_cores() -> int:
    """Cores' worth of time that this process may use, by its affinity and its control groups; at least 1.

    A machine may have many more cores, which other jobs use: threads for these would only wait for each other.
    """
    quota = core_quota()
    return len(cores()) if quota is None else max(1, min(len(cores()), int(quota)))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the control groups around this process grant it; ``None`` if that is the whole machine.

    Args:
        root: root of the file system that is asked.
    """
    found = []
    for folder, is_v2 in group_folders(root, "memory"):
        for name in ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
    total = total_memory(root)
    return min((limit for limit in found if not total or limit < total), default=None)


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of the whole machine's memory; 0 where the system does not say.

    Args:
        root: root of the file system that is asked.
    """
    return of_system(root, "MemTotal") or 0


def lockable_memory() -> int | None:
    """Bytes that this process may lock (``ulimit -l``); ``None`` without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
