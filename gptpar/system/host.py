"""The memory and cores that this process may use, and its place among the run's processes on the machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be used without swapping; 0 where the system does not say.

    The limits of all control groups around this process count (a container's, Slurm's, systemd's), each less the memory
    that the group uses and cannot reclaim.

    Args:
        root: root of the file system that is asked.
    """
    free = of_system(root, "MemAvailable")
    if free is None:
        return 0
    groups = group_folders(root, "memory")
    return max(0, min([free, *(left for folder, is_v2 in groups for left in (_V2 if is_v2 else _V1).free(folder))]))


def free_swap(root: Path = Path("/")) -> int:
    """Bytes of swap space that are free; 0 where the system does not say."""
    return of_system(root, "SwapFree") or 0


def of_system(root: Path, name: str) -> int | None:
    """Bytes that the system says of its memory under a name such as ``MemTotal``; ``None``: it does not say."""
    try:
        with (root / "proc/meminfo").open() as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None


@dataclass(frozen=True)
class _GroupFiles:
    """The names of files in one version of control groups."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str

    def free(self, folder: Path) -> Iterator[int]:
        """Bytes left below each limit of a group; yields nothing without a limit."""
        stat: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        for name in self.limits:
            # no such group, or a limit that is missing or "max"
            with contextlib.suppress(OSError, ValueError):
                limit, used = int((folder / name).read_text()), int((folder / self.used).read_text())
                yield limit - used + int(stat.get(self.reclaimable, 0))


_V1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders that may describe this process's control group and all groups around it, in both versions.

    A machine may have both versions. A folder need not exist.

    Args:
        root: root of the file system that is asked.
        controller: ``"memory"`` or ``"cpu"``.

    Yields:
        (folder, whether its files are those of version 2)
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mounts = root / "sys/fs/cgroup"
    # A container may see its own group as the root, and yet read the host's path of it here.
    paths = {"": {PurePosixPath("/")}, controller: {PurePosixPath("/")}}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for found in {"", controller} & set(controllers.split(",")):
            group = PurePosixPath("/", *(part for part in path.split("/") if part not in ("", "..")))
            paths[found] |= {group, *group.parents}
    for mount, of, is_v2 in (
        (mounts, "", True),
        (mounts / "unified", "", True),
        (mounts / controller, controller, False),
    ):
        for group in paths[of]:
            yield mount / group.relative_to("/"), is_v2


def process_memory() -> int | None:
    """Bytes of this process in memory; ``None`` where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def peak_process_memory() -> int | None:
    """The most bytes that this process has had in memory; ``None`` where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpuinfo() -> list[str]:
    """The lines that Linux has of the processors; none where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


def processor() -> str:
    """The processor's name, as the system gives it."""
    names = [line.split(":", 1)[1].strip() for line in cpuinfo() if line.startswith("model name")]
    return names[0] if names else platform.machine() or "unknown processor"


def cores_of_process(place: int, of: int) -> list[int]:
    """The cores of one of several processes on this machine: neighbours, which have a memory controller in common.

    Args:
        place: number of the process on this machine.
        of: number of processes on this machine; if they outnumber the cores, some get all cores.
    """
    mine = cores()
    part = mine[place * len(mine) // of : (place + 1) * len(mine) // of]
    return part or mine


def place_on_machine() -> tuple[int, int]:
    """(this process's number on this machine, number of the run's processes on this machine), from the environment.

    (0, 1) if no launcher has set them.
    """
    place, number = local_rank(os.environ), _whole(os.environ.get("LOCAL_WORLD_SIZE"))
    if number is None and "LOCAL_RANK" not in os.environ and "RANK" in os.environ:
        names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
        number = next((found for name in names if (found := _whole(os.environ.get(name)))), None)
    return place or 0, number or 1


def local_rank(environment: Mapping[str, str]) -> int | None:
    """This process's number on its machine: torchrun's, else that of mpirun or srun if they started the ranks.

    A batch script has SLURM_LOCALID=0, which all processes that it starts inherit. So a variable of mpirun or srun
    counts only if its rank in the job equals RANK.
    """
    if (given := _whole(environment.get("LOCAL_RANK"))) is not None:
        return given
    for local, world in LOCAL_RANKS:
        found = _whole(environment.get(local))
        if found is not None and environment.get(world) in (None, environment.get("RANK")):
            return found
    return None


LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
    ("MPI_LOCALRANKID", "PMI_RANK"),
    ("SLURM_LOCALID", "SLURM_PROCID"),
)
"""(variable of the number on the machine, variable of the rank in the job) of Open MPI, MPICH and Slurm."""

_STARTERS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun or srun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("srun", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""(program, its variables of the number of processes, of the rank, and of the number on the machine)"""


def several_without_rank(environment: Mapping[str, str]) -> str | None:
    """The problem if mpirun or srun started several processes without RANK: each would take itself for the only one.

    A batch script, or a shell of salloc, is one process whatever SLURM_NTASKS says: only srun sets SLURM_STEP_ID, or a
    SLURM_PROCID above 0.
    """
    is_task = "SLURM_STEP_ID" in environment or environment.get("SLURM_PROCID", "0") != "0"
    of_step = is_task and "SLURM_STEP_NUM_TASKS" not in environment
    for program, size, rank, local in _STARTERS:
        counts = "RANK" not in environment and (size != "SLURM_NTASKS" or of_step)
        if counts and environment.get(size, "1") not in ("0", "1"):
            return (
                f"{program} started {environment[size]} processes ({size}) without RANK and WORLD_SIZE, so that each "
                f"would train by itself: export RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local} in each, and "
                "MASTER_ADDR and MASTER_PORT; or start one process on each machine, gptpar launch --nnodes with the "
                f"number of machines; or unset {size} where each is a run of its own"
            )
    return None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
