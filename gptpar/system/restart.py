"""Messages around a restart: from the launcher to new workers, and from workers to their successors."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gptpar.system.activity import FOLDER_VARIABLE

VARIABLE = "GPTPAR_RESTART"
MEMORY_VARIABLE = "GPTPAR_MEMORY_FOLDER"
"""The environment variable in which the launcher, or whoever starts it, names a folder in this machine's memory that
outlives the workers."""

SHARES_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun's variable: at each start workers meet in a new store, not in one that keeps addresses of dead workers."""

_BEGUN = "begun"
_FINAL = "final"
_STOPPED = "stopped"


@dataclass(frozen=True)
class Restart:
    """Which start of the workers this is.

    Attributes:
        number: 0 for the first start.
        limit: number of restarts that are allowed; 0 where each machine's launcher has its own count.
        noticed_s: seconds, at most, from the death until the launcher noticed it.
        ended_s: seconds that it took to end the other workers.
        started: when the launcher began to start this worker, on the machine's monotonic clock, in seconds.
    """

    number: int = 0
    limit: int = 0
    noticed_s: float = 0.0
    ended_s: float = 0.0
    started: float = 0.0

    @classmethod
    def of_worker(cls) -> Restart:
        """The launcher's message to this process; without one, the first start of a run that is not restarted."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """The environment variable for a worker that is started now."""
        return {VARIABLE: json.dumps(dataclasses.asdict(dataclasses.replace(self, started=time.monotonic())))}


def has_launcher_that_restarts() -> bool:
    """Whether one launcher starts all workers again, so that all of them know whether the run has begun."""
    return VARIABLE in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def memory_folder() -> Path | None:
    """The folder in this machine's memory that outlives this process; ``None`` without a launcher that restarts."""
    folder = os.environ.get(MEMORY_VARIABLE)
    return Path(folder) if folder else None


def note_begun() -> None:
    """Note that this run has left the state that its command line names: checkpoints in its folder are now its own."""
    if (folder := _folder()) is not None:
        (folder / _BEGUN).touch()


def has_begun() -> bool:
    """Whether an earlier start of this run has called :func:`note_begun`."""
    folder = _folder()
    return folder is not None and (folder / _BEGUN).exists()


def note_final() -> None:
    """Note that this worker's failure is no accident: after a restart it would fail again."""
    if (folder := _folder()) is not None:
        (folder / f"{_FINAL}{os.environ.get('RANK', '0')}").touch()


def note_stopped() -> None:
    """Note that this worker's run was stopped by a request, which another machine's launcher may have got."""
    if (folder := _folder()) is not None:
        (folder / _STOPPED).touch()


def was_stopped(folder: Path) -> bool:
    """Whether a worker has called :func:`note_stopped`.

    Args:
        folder: folder of the workers' records of activity.
    """
    return (folder / _STOPPED).exists()


def is_final(folder: Path, rank: int) -> bool:
    """Whether a worker has called :func:`note_final`.

    Args:
        folder: folder of the workers' records of activity.
    """
    return (folder / f"{_FINAL}{rank}").exists()


def forget_final(folder: Path) -> None:
    """Remove the workers' notes of :func:`note_final` before a restart.

    A worker may have made one although another one's death was the cause.
    """
    for path in folder.glob(f"{_FINAL}*"):
        path.unlink()


def _folder() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None
