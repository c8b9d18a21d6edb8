"""Disturb this process's own file operations below a folder: die at one, let one fail, make some slow.

An operation is: open for writing, rename, remove, mkdir, rmdir, link, utime, write, fsync, truncate. Python reports
most of them through its audit hooks; the functions for the others are wrapped. This module imports only the standard
library, because it is loaded before everything else. The specification is the JSON of ``VARIABLE`` in the environment:

    under    the folder
    rank     only in the process whose RANK this is (default: in each)
    kill_at  number of the operation at which the process kills itself with SIGKILL
    fail_at  number of the operation that raises OSError; ``errno`` its number; ``fail_for`` how many in a row
    slow_s   seconds that publishing a checkpoint (a rename to iter_NNNNNNN) takes
    count    a file to which the number of operations is written, with ``-RANK`` behind its name
"""

import atexit
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "GPTPAR_TEST_DISTURB"
_WITH_PATH = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.utime", "os.truncate"}
_DESCRIPTORS_AT = {"os.rename": 2, "os.link": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.utime": 3}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def from_environment() -> None:
    """Install what the environment asks for, if it asks."""
    text = os.environ.get(VARIABLE)
    if text:
        install(json.loads(text))


def install(spec: dict[str, Any]) -> None:
    """Disturb this process from now on."""
    rank = os.environ.get("RANK")
    is_launcher = rank is None and spec.get("rank") is not None
    if is_launcher or (spec.get("rank") is not None and int(rank or 0) != spec["rank"]):
        return
    disturber = _Disturber(spec)
    sys.addaudithook(disturber.audit)
    for name in ("write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "ftruncate"):
        setattr(os, name, disturber.wrapped(getattr(os, name)))
    if "count" in spec:
        atexit.register(disturber.tell, f"{spec['count']}-{rank or 0}")


class _Disturber:
    def __init__(self, spec: dict[str, Any]):
        self._spec, self._under = spec, os.path.realpath(spec["under"])
        self._number = 0
        self._inside = threading.local()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
                self._operation(path, -1)
        elif event in _WITH_PATH:
            position = _DESCRIPTORS_AT.get(event)
            descriptor = arguments[position] if position is not None and len(arguments) > position else -1
            self._operation(arguments[0], descriptor, is_publishing(event, arguments))

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            self._operation(descriptor, -1)
            return function(descriptor, *arguments)

        return call

    def tell(self, path: str) -> None:
        with open(path, "w") as file:
            file.write(str(self._number))

    def _operation(self, place: Any, descriptor: Any, publishing: bool = False) -> None:
        if getattr(self._inside, "busy", False):
            return
        self._inside.busy = True
        try:
            self._act(place, descriptor, publishing)
        finally:
            self._inside.busy = False

    def _act(self, place: Any, descriptor: Any, publishing: bool) -> None:
        spec = self._spec
        if not self._is_under(place, descriptor):
            return
        self._number += 1
        if self._number == spec.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        first = spec.get("fail_at")
        if first is not None and first <= self._number < first + spec.get("fail_for", 1):
            raise OSError(spec["errno"], os.strerror(spec["errno"]))
        if publishing and spec.get("slow_s"):
            time.sleep(spec["slow_s"])

    def _is_under(self, place: Any, descriptor: Any) -> bool:
        try:
            if isinstance(place, int):
                path = os.readlink(f"/proc/self/fd/{place}")
            else:
                path = os.fsdecode(place)
                if not os.path.isabs(path):
                    start = "cwd" if not isinstance(descriptor, int) or descriptor < 0 else f"fd/{descriptor}"
                    path = os.path.join(os.readlink(f"/proc/self/{start}"), path)
        except (OSError, TypeError):
            return False
        return os.path.normpath(path).startswith(self._under + os.sep)


def is_publishing(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event gives a checkpoint its final name."""
    target = os.path.basename(os.fsdecode(arguments[1])) if event == "os.rename" else ""
    return re.fullmatch(r"iter_\d+", target) is not None
