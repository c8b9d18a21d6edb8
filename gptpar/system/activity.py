"""Notes what each worker is doing, in a record that outlives it, and finds signs of life."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptpar.errors import GptparError, first_line

FOLDER_VARIABLE = "GPTPAR_ACTIVITY_FOLDER"
"""The environment variable in which the launcher names the folder of records; without it nothing is recorded."""

CULPRIT_FIRST_SECONDS = 4.0
"""How long a worker that lost another waits before it ends, so that the failed one ends and prints its message first.

More than ``command_line.OTHERS_FIRST_SECONDS``, for which a failing worker may hold its message back.
"""

SLOT_BYTES = 255
"""Bytes of one of the two texts in a process's record."""
START = "start-up"
"""The activity of a worker that has noted none."""
COUNTED_BYTES = 2**20
"""Bytes that count as a sign of life: a thread that polls a small file reads fewer."""
_PREFIX = "rank"
# Messages of gloo, NCCL and the store when the process at the other end of a connection is gone or does not answer.
_LOST = re.compile(
    r"gloo/transport|ncclRemoteError|remote process exited|Connection (was likely )?(closed|reset)"
    r"|Broken pipe|Socket Timeout|[Ww]ait timeout after|Timed out waiting|timeout caused pair closure"
)


class LostRankError(GptparError):
    """Another process of the run is gone; that process, or its launcher, reports what happened."""

    is_accident = True


class Activity:
    """A worker's note of what it is doing, which a launcher can read from a record.

    The record is a file mapped to memory, so that a note costs no system call and survives SIGKILL. It holds the number
    of notes (one byte, so that even an equal note is a sign of life) and two slots. The number's lowest bit says which
    slot is valid. Each note is written to the other slot, so that a death never leaves half a note.

    Args:
        rank: this process's rank, for the record's name and for messages.
        folder: the record's folder; ``None``: the note stays in this process.

    Attributes:
        doing: the last note.
    """

    def __init__(self, rank: int = 0, folder: Path | None = None):
        self.rank, self.doing = rank, START
        self._record: mmap.mmap | None = None
        if folder is not None:
            # If there is no room for a record, the note stays in this process. The record is written full of zeros: a
            # hole in a mapped file, which a full disk cannot fill later, would end this process with SIGBUS.
            with contextlib.suppress(OSError), _path(folder, rank).open("w+b") as file:
                file.write(bytes(1 + 2 * SLOT_BYTES))
                file.flush()
                self._record = mmap.mmap(file.fileno(), 1 + 2 * SLOT_BYTES)
            self.note(START)

    @classmethod
    def of_worker(cls) -> Activity:
        """This worker's record; torchrun and the launcher have set rank and folder in the environment."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(int(os.environ.get("RANK", "0")), Path(folder) if folder else None)

    def note(self, doing: str) -> None:
        """Note what begins now, such as ``iteration 12, micro-batch 3, backward``; at most 255 bytes are kept."""
        self.doing = doing
        if self._record is not None:
            number = (self._record[0] + 1) % 256
            text = doing.encode()[:SLOT_BYTES]
            self._record[_slice(number)] = text.ljust(SLOT_BYTES, b"\0")
            self._record[0] = number

    @contextlib.contextmanager
    def lost_ranks_explained(self) -> Iterator[None]:
        """Turn the failure of a collective, if another process caused it, into one sentence.

        Raises:
            LostRankError: instead of the failure. A pause before it lets the launcher see which process failed first,
                and end this one.
        """
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            time.sleep(CULPRIT_FIRST_SECONDS)
            reason = re.sub(r"^\[[^]]*\] ", "", first_line(error)).split(". ")[0]
            raise LostRankError(
                f"rank {self.rank} lost another rank while it was at {self.doing}; torch says: {reason}"
            ) from error


def last_activity(folder: Path, rank: int) -> str:
    """The last note of a worker, dead or alive; ``START`` if it has made none."""
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
    """Each worker's record; its bytes change with every note."""
    return {rank: _path(folder, rank).read_bytes() for rank in _ranks(folder)}


def forget_records(folder: Path) -> None:
    """Remove all records before other workers start."""
    for rank in _ranks(folder):
        _path(folder, rank).unlink()


def _ranks(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*"))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_PREFIX}{rank}"


def _slice(number: int) -> slice:
    slot = number % 2
    return slice(1 + slot * SLOT_BYTES, 1 + (slot + 1) * SLOT_BYTES)


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
