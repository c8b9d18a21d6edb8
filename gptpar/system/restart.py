"""What a launcher tells restarted workers, and the notes that workers leave for later ones."""

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
"""Names the launcher's folder in this machine's memory, which outlives the workers."""

_BEGUN = "begun"
_FINAL = "final"


@dataclass(frozen=True)
class Restart:
    """Which start of the workers this is.

    Attributes:
        number: 0 for the first start.
        limit: the most restarts that there may be.
        noticed_s: upper bound of the seconds from the death until the launcher noticed it.
        ended_s: seconds that it took to end the other workers.
        started: when the launcher began to start this worker, on the machine's monotonic clock.
    """

    number: int = 0
    limit: int = 0
    noticed_s: float = 0.0
    ended_s: float = 0.0
    started: float = 0.0

    @classmethod
    def of_worker(cls) -> Restart:
        """The restart that the launcher told this process; without a launcher, the first start of a run."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """The variable that tells a worker which is started now."""
        return {VARIABLE: json.dumps(dataclasses.asdict(dataclasses.replace(self, started=time.monotonic())))}


def memory_folder() -> Path | None:
    """The folder in this machine's memory that outlives this process; ``None`` without a launcher that restarts."""
    folder = os.environ.get(MEMORY_VARIABLE)
    return Path(folder) if folder else None


def note_begun() -> None:
    """Note that the first start has loaded its state: from now on the newest state in the run's folder is its own."""
    if (folder := _folder()) is not None:
        (folder / _BEGUN).touch()


def has_begun() -> bool:
    """Whether an earlier start has called :func:`note_begun`."""
    folder = _folder()
    return folder is not None and (folder / _BEGUN).exists()


def note_final() -> None:
    """Note that this worker's failure would come again after a restart."""
    if (folder := _folder()) is not None:
        (folder / f"{_FINAL}{os.environ.get('RANK', '0')}").touch()


def is_final(folder: Path, rank: int) -> bool:
    """Whether this worker has called :func:`note_final`.

    Args:
        folder: of the workers' records of activity.
    """
    return (folder / f"{_FINAL}{rank}").exists()


def forget_final(folder: Path) -> None:
    """Remove these notes before a restart: a worker may have left one although another worker's death was the cause."""
    for path in folder.glob(f"{_FINAL}*"):
        path.unlink()


def _folder() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None
