"""What a launcher tells the workers that it starts again after a death, and what they leave for the next ones."""

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
"""A launcher, or whoever starts one, names a folder of this machine's memory in it that outlives the workers."""

SHARES_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun's: workers meet in a new store at each start, instead of one that keeps the addresses of the dead."""

_BEGUN = "begun"
_FINAL = "final"


@dataclass(frozen=True)
class Restart:
    """Which start of the workers this is.

    Attributes:
        number: 0 for the first start.
        limit: how many restarts there may be.
        noticed_s: at most so long after the death the launcher knew of it.
        ended_s: so long it took to end the others.
        started: on the machine's monotonic clock, when the launcher began to start this worker.
    """

    number: int = 0
    limit: int = 0
    noticed_s: float = 0.0
    ended_s: float = 0.0
    started: float = 0.0

    @classmethod
    def of_worker(cls) -> Restart:
        """What this process was told; the first start of a run that is not restarted, where nobody tells."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """For a worker that is started now."""
        return {VARIABLE: json.dumps(dataclasses.asdict(dataclasses.replace(self, started=time.monotonic())))}


def is_told_how_to_go_on() -> bool:
    """Whether this package's own supervisor starts this worker again, and a later start goes on by itself."""
    return VARIABLE in os.environ


def memory_folder() -> Path | None:
    """Where state outlives this process in this machine's memory; ``None`` without a launcher that restarts."""
    folder = os.environ.get(MEMORY_VARIABLE)
    return Path(folder) if folder else None


def note_begun() -> None:
    """The first start has left the state that it was told to load: what is in the run's folder now is its own."""
    if (folder := _folder()) is not None:
        (folder / _BEGUN).touch()


def has_begun() -> bool:
    """Whether an earlier start came so far."""
    folder = _folder()
    return folder is not None and (folder / _BEGUN).exists()


def note_final() -> None:
    """This worker's failure is no accident: started again, it would fail again."""
    if (folder := _folder()) is not None:
        (folder / f"{_FINAL}{os.environ.get('RANK', '0')}").touch()


def is_final(folder: Path, rank: int) -> bool:
    """Whether this worker said so.

    Args:
        folder: of the workers' records of activity.
    """
    return (folder / f"{_FINAL}{rank}").exists()


def forget_final(folder: Path) -> None:
    """Other workers come, who have not said so: somebody may have, while another one's death was the cause."""
    for path in folder.glob(f"{_FINAL}*"):
        path.unlink()


def _folder() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None
