"""Lets one run at a time write into a folder: the owner's claim, its signs of life, and when it counts as dead.

    root/owner-1.json    host, process and start of the run; its modification time is the last sign of life

The claim with the highest number owns the folder. A claim is created whole and only where its name is free: of two runs
that start together one is refused. The claim of a dead run is not replaced but outnumbered: of two runs that find it
dead one is refused, too, and a run that was only asleep sees that it has lost. No file lock is needed.

Whether a run has died is exact on its own machine. Elsewhere it has died when it gave no sign of life for
`DEAD_AFTER_SECONDS` of the file system's clock, which wrote all the times that are compared. A new run waits until
then, and is refused at the next sign of life.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptpar.checkpoint.folders import find_checkpoints
from gptpar.errors import CheckpointError, FolderTakenError, printable
from gptpar.system.files import read_regular, write_synced
from gptpar.system.processes import Process

SIGN_OF_LIFE_SECONDS = 15.0
DEAD_AFTER_SECONDS = 180.0

DISK_ERRORS = frozenset(
    (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV, errno.EREMOTEIO)
)
"""Errors of a file system that is away or broken; they say nothing about who owns a folder."""

_CLAIM = re.compile(r"owner-(\d+)\.json")


@dataclass(frozen=True)
class Claim:
    """A run's claim to a folder.

    Attributes:
        token: differs in every claim; empty if the file cannot be read.
        process: of the run; None if the file cannot be read.
        since: when the run began, in its own clock.
        sign_of_life: the last one, in the file system's clock, since the epoch.
    """

    path: Path
    number: int
    token: str
    process: Process | None
    since: str
    sign_of_life: float

    def is_dead(self, silence: float) -> bool:
        """Whether the run has ended, after so many seconds without a sign of life."""
        if self.process is not None and self.process.is_local():
            return not self.process.is_alive()
        return silence > DEAD_AFTER_SECONDS

    def describe(self) -> str:
        """``host node3, process 4711, since 2026-01-31 12:00:00``"""
        if self.process is None:
            return f"{self.path.name} cannot be read"
        return printable(f"host {self.process.host}, process {self.process.pid}, since {self.since}")


def current_claim(root: Path) -> Claim | None:
    """The claim that owns the folder, alive or dead; None if there is none."""
    while True:
        try:
            matches = [match for name in os.listdir(root) if (match := _CLAIM.fullmatch(name))]
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not matches:
            return None
        for match in sorted(matches, key=lambda match: int(match[1]), reverse=True):
            try:
                return _read(root / match[0], int(match[1]))
            except FileNotFoundError:  # given back, or taken over: then a newer claim is there, so look again
                continue


def is_seen(root: Path, token: str, seconds: float) -> bool:
    """Whether the claim with this token is in the folder; on a network file system it may appear seconds later."""
    deadline = time.monotonic() + seconds
    while (claim := current_claim(root)) is None or claim.token != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class Owner:
    """This run's claim to a folder. A thread shows that the run is alive; ``close`` gives the folder back.

    Args:
        root: the folder, created where missing.
        say: called with a sentence if a dead run's folder is taken over.

    Attributes:
        token: of the claim.

    Raises:
        FolderTakenError: another run writes there; says which, and what to do.
    """

    def __init__(self, root: Path, say: Callable[[str], None]):
        self._root, self._say, self.token = root, say, secrets.token_hex(8)
        self._made = [folder for folder in (root, *root.parents) if not folder.exists()]
        try:
            self._path = self._take()
        except OSError as error:
            raise CheckpointError(f"cannot write into the run folder {root}: {error.strerror}") from error
        self._checkpoints = self._find_checkpoints()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="gptpar-owner", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Make sure that the folder is still this run's, before anything is written or deleted.

        A claim that somebody removed, alone or with the folder, is made again if no run came since.

        Raises:
            FolderTakenError: the folder is another run's now.
            CheckpointError: the disk failed, so that nobody knows.
        """
        try:
            self._require()
        except OSError as error:
            raise CheckpointError(
                f"the disk failed while this run read the names in {self._root} ({error.strerror}): nothing was "
                "written or deleted there"
            ) from error

    def _require(self) -> None:
        claim = current_claim(self._root)
        if claim is None and not self._is_mine() and self._find_checkpoints() <= self._checkpoints:
            self._path = self._take()
            self._say(f" > the owner file of {self._root} had been removed, and no other run came: written again")
        elif not self._is_mine() or (claim is not None and claim.number > self._number):
            by = "other checkpoints than this run's are in it" if claim is None else claim.describe()
            raise FolderTakenError(
                f"{self._root} was taken by another run while this one trained ({by}): this run stops and "
                "writes and deletes nothing there. Its own checkpoints are as they were unless that run moved or "
                "deleted them; see gptpar runs"
            )
        self._checkpoints = self._find_checkpoints()

    def close(self) -> None:
        """Give the folder back; one that was made for this run and holds nothing is removed."""
        self._closing.set()
        self._thread.join(timeout=10)  # it may hang on a disk that is away
        if self._is_mine():
            self._path.unlink(missing_ok=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:  # something is in it
                break

    def _take(self) -> Path:
        process, since = Process.this(), time.strftime("%Y-%m-%d %H:%M:%S")
        draft = self._root / f".owner-{self.token}.tmp"
        text = json.dumps({"token": self.token, "since": since, "process": process.to_dict()}, indent=2)
        first_seen: Claim | None = None
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            while True:
                write_synced(draft, text)  # each time: its modification time is the file system's clock
                claim = current_claim(self._root)
                if claim is not None:
                    silence = draft.stat().st_mtime - claim.sign_of_life
                    if self._must_wait(claim, silence, first_seen):
                        first_seen = first_seen or claim
                        time.sleep(2.0)
                        continue
                path = self._root / f"owner-{1 if claim is None else claim.number + 1}.json"
                if _create(path, draft, text):
                    newest = current_claim(self._root)
                    if newest is not None and newest.path.name != path.name:
                        path.unlink(missing_ok=True)  # the list of names had missed another run's claim
                        continue
                    if claim is not None:
                        claim.path.unlink(missing_ok=True)
                    return path
        finally:
            draft.unlink(missing_ok=True)

    def _must_wait(self, claim: Claim, silence: float, first_seen: Claim | None) -> bool:
        """False if the claim's run is dead; True if that is to be seen; else FolderTakenError.

        Args:
            first_seen: the claim when the waiting began.
        """
        if claim.is_dead(silence):
            self._say(f" > {self._root} was left by a run that has ended ({claim.describe()}): taken over")
            return False
        local = claim.process is not None and claim.process.is_local()
        if not local and first_seen is None:
            self._say(
                f" > {self._root} is another run's ({claim.describe()}) that has been silent for {max(0, silence):.0f} "
                f"s: waiting for up to {DEAD_AFTER_SECONDS - silence:.0f} s whether it is still there"
            )
            return True
        if not local and first_seen is not None and claim.sign_of_life <= first_seen.sign_of_life:
            return True
        raise FolderTakenError(
            f"{self._root} is in use: another run writes there ({claim.describe()}, last sign of life "
            f"{max(0, silence):.0f} s ago). Wait for its end or stop it, or choose another --save; if that run is "
            f"certainly gone, delete {claim.path}"
        )

    def _find_checkpoints(self) -> frozenset[str]:
        return frozenset(path.name for _, path in find_checkpoints(self._root))

    @property
    def _number(self) -> int:
        match = _CLAIM.fullmatch(self._path.name)
        assert match is not None
        return int(match[1])

    def _is_mine(self) -> bool:
        """Whether this run's claim is there; network file systems list new entries late, but find them by name."""
        try:
            return _read(self._path, 0).token == self.token
        except OSError:
            return False

    def _show_life(self) -> None:
        while not self._closing.wait(SIGN_OF_LIFE_SECONDS):
            try:
                if self._is_mine():
                    os.utime(self._path)  # without a time: the file system's own clock
            except OSError:  # a disk that is away for a while, or a claim that is gone: `require` will report it
                pass


def _read(path: Path, number: int) -> Claim:
    try:
        text = read_regular(path)  # read first: network file systems then ask for its times
        sign_of_life = path.stat().st_mtime
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        # nothing that a run wrote
        return Claim(path, number, "", None, "", path.lstat().st_mtime)
    try:
        values = json.loads(text)
        process = Process.from_dict(values["process"])
        return Claim(path, number, str(values["token"]), process, str(values["since"]), sign_of_life)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Claim(path, number, "", None, "", sign_of_life)


def _create(path: Path, draft: Path, text: str) -> bool:
    """Create a claim whole; False if the name is taken. Without hard links it is filled after it was created."""
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except OSError:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return True
        except FileExistsError:
            return False
