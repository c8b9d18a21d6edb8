"""The machine's memory and cores, as far as this process may use them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of host memory that can be used without swapping; 0 where the system does not say.

    A container's limit counts, less what it uses and could not give back.
    """
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used = int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):  # no such control group
        pass
    return max(0, free)


def process_memory() -> int | None:
    """Bytes of this process in memory; ``None`` where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processor() -> str:
    """The processors' name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "unknown processor"


def share_of_cores(place: int, of: int) -> list[int]:
    """The cores of one of several processes on this machine: neighbours, so that they share a memory controller."""
    mine = cores()
    share = mine[place * len(mine) // of : (place + 1) * len(mine) // of]
    return share or mine


def place_on_machine() -> tuple[int, int]:
    """(this process's number among the run's processes on this machine, their number), as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
