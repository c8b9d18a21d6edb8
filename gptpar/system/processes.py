"""Finds out whether a process still runs, and which processes it has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """A description that identifies a process beyond its number, which other machines and containers use, too.

    Attributes:
        host: name of the machine.
        pid: its number there.
        started: time of its start, in the kernel's ticks since the machine's; empty where the system does not say.
        boot: identifies a start of a machine; empty where the system does not say.
        namespace: the PID namespace of ``pid``: a container has its own.
    """

    host: str
    pid: int
    started: str
    boot: str
    namespace: str

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        _, started = _state_and_start(os.getpid())
        return cls(socket.gethostname(), os.getpid(), started, _boot(), _namespace())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Process:
        """The inverse of ``to_dict``.

        Raises:
            KeyError, TypeError, ValueError: something is missing or no number.
        """
        texts = {key: str(values[key]) for key in ("host", "started", "boot", "namespace")}
        return cls(pid=int(values["pid"]), **texts)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)

    def is_local(self) -> bool:
        """Whether its number denotes the same process here."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), _boot(), _namespace())

    def is_alive(self) -> bool:
        """Whether a local process still runs; a later process with the same number does not count."""
        _, started = _state_and_start(self.pid)
        reused = bool(started and self.started) and started != self.started
        return is_running(self.pid) and not reused


def is_running(pid: int) -> bool:
    """Whether a process of this machine has not ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    state, _ = _state_and_start(pid)
    return state not in ("Z", "X")  # a zombie has ended, though its parent has not asked for its status


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (by SIGSTOP, Ctrl-Z or a debugger)."""
    return _state_and_start(pid)[0] in ("T", "t")


def children(pid: int) -> set[int]:
    """The running processes that a process has started; none where the system does not say."""
    return {child for child, parent, state in _family() if parent == pid and state != "Z"}


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, ended ones too; none where the system does not say."""
    started: dict[int, list[int]] = {}
    for child, parent, _ in _family():
        started.setdefault(parent, []).append(child)
    found, waiting = [], [pid]
    while waiting:
        mine = started.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def _family() -> Iterator[tuple[int, int, str]]:
    """(process, its parent, its state) of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(folder.name)):  # else it ended meanwhile
            yield int(folder.name), int(fields[1]), fields[0]


def _state_and_start(pid: int) -> tuple[str, str]:
    """(the kernel's letter for a process's state, time of its start in ticks); empty where the system does not say."""
    fields = _fields(pid)
    return (fields[0], fields[19]) if fields else ("", "")


def _fields(pid: int) -> list[str]:
    """Fields of the kernel's ``stat`` of a process behind its name, which may hold any bytes; empty if it is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields if len(fields) > 19 else []


def _boot() -> str:
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
