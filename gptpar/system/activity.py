"""What each worker is doing, kept where it outlives the worker, so that a sudden death can be told with its place."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from gptpar.errors import GptparError

FOLDER_VARIABLE = "GPTPAR_ACTIVITY_FOLDER"
"""The launcher names the folder of the records in it; without it nothing is recorded."""

CULPRIT_FIRST_SECONDS = 4.0
"""How long a worker that lost another waits before it ends: whoever failed is to be seen, and heard, first.

More than ``command.OTHERS_FIRST_SECONDS``, for which a failing worker may hold its message back.
"""

SLOT_BYTES = 255
START = "start-up"
_PREFIX = "rank"
# What gloo, NCCL and the store say when the process at the other end of a connection is gone or does not answer.
_LOST = re.compile(r"gloo/transport|ncclRemoteError|remote process exited|Connection (was likely )?(closed|reset)")


class LostRankError(GptparError):
    """Another process of the run is gone; what happened to it is told by that process or by its launcher."""

    is_accident = True


class Activity:
    """A worker's note of what it is doing: an assignment and, under a launcher that asks for it, a write to memory.

    The record is a file mapped to memory, so a note costs no system call and survives SIGKILL. It holds the number of
    notes (one byte, so that the same note again is a sign of life) and two slots. The number's lowest bit says which
    is valid; the other one is written: death never leaves half a note.

    Args:
        rank: of this process, for the record's name and for messages.
        folder: where the record goes; ``None`` keeps the note in this process only.

    Attributes:
        doing: the last note.
    """

    def __init__(self, rank: int = 0, folder: Path | None = None):
        self.rank, self.doing = rank, START
        self._record: mmap.mmap | None = None
        if folder is not None:
            # Without room for a record the note stays here. Zeros are written: a hole that the disk cannot fill later
            # would end this process with SIGBUS.
            with contextlib.suppress(OSError), _path(folder, rank).open("w+b") as file:
                file.write(bytes(1 + 2 * SLOT_BYTES))
                file.flush()
                self._record = mmap.mmap(file.fileno(), 1 + 2 * SLOT_BYTES)
            self.note(START)

    @classmethod
    def of_worker(cls) -> Activity:
        """This worker's record, as the environment set by torchrun and the launcher describes it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(int(os.environ.get("RANK", "0")), Path(folder) if folder else None)

    def note(self, doing: str) -> None:
        """Say what comes now, as a place: ``iteration 12, micro-batch 3, backward``; cut after 255 bytes."""
        self.doing = doing
        if self._record is not None:
            number = (self._record[0] + 1) % 256
            text = doing.encode()[:SLOT_BYTES]
            self._record[_slice(number)] = text.ljust(SLOT_BYTES, b"\0")
            self._record[0] = number

    @contextlib.contextmanager
    def lost_ranks_explained(self) -> Iterator[None]:
        """Turn a collective's failure because of another process into one sentence.

        Raises:
            LostRankError: in its place, after a pause in which the launcher, seeing who failed, may end this process.
        """
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            time.sleep(CULPRIT_FIRST_SECONDS)
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0].split(". ")[0]
            raise LostRankError(
                f"rank {self.rank} lost another rank while it was at {self.doing}; torch says: {reason}"
            ) from error


def last_activity(folder: Path, rank: int) -> str:
    """The last note of a worker that may be dead."""
    try:
        record = _path(folder, rank).read_bytes()
    except FileNotFoundError:  # it died before it could write anything
        record = b""
    if len(record) < 1 + 2 * SLOT_BYTES:
        return START
    return record[_slice(record[0])].rstrip(b"\0").decode(errors="ignore")


def all_activities(folder: Path) -> dict[int, str]:
    """The last note of each worker that has a record in the folder."""
    return {rank: last_activity(folder, rank) for rank in _ranks(folder)}


def records(folder: Path) -> dict[int, bytes]:
    """Each worker's record, which every note changes."""
    return {rank: _path(folder, rank).read_bytes() for rank in _ranks(folder)}


def forget_records(folder: Path) -> None:
    """Remove all records: other workers come."""
    for rank in _ranks(folder):
        _path(folder, rank).unlink()


def _ranks(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*"))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_PREFIX}{rank}"


def _slice(number: int) -> slice:
    slot = number % 2
    return slice(1 + slot * SLOT_BYTES, 1 + (slot + 1) * SLOT_BYTES)
