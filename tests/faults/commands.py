"""``gptpar`` commands as real processes that cost no start-up: forked from this one, which has imported everything.

Workers that a launcher starts are ordinary Python processes, and so is a command that is asked to be ``fresh``. A
process that forks must have no other threads.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.hook import disturb

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")
HOOK = Path(disturb.__file__).parent
MARK = "GPTPAR_TEST_FAULT"
"""Variable by which all processes of a command are found, whoever started them."""

MAX_MEMORY_BYTES = 12 << 30
"""Address space of a command: one that reads a device for ever must not take the machine's memory."""

POLL_SECONDS = 0.004


def preload() -> None:
    """Import what the verbs need, once for all commands."""
    for verb in ("evaluate", "generate", "inspect", "plot", "preprocess", "pretrain", "runs", "summary"):
        importlib.import_module(f"gptpar.cli.{verb}")
    for name in ("tensorboard", "torch.distributed.run", "gptpar.__main__"):
        importlib.import_module(name)
    assert threading.active_count() == 1


class Running:
    """A command under way, or ended.

    Attributes:
        pid: its process's; the process leads a session of its own.
        status: exit status, negative after a signal; ``None`` before :meth:`wait` has seen the end.
    """

    def __init__(self, pid: int, output: Path, mark: str):
        self.pid, self._output, self._mark = pid, output, mark
        self.status: int | None = None
        self.started = time.monotonic()

    def text(self) -> str:
        """Everything said so far, on stdout and stderr."""
        return self._output.read_bytes().decode(errors="replace")

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def until(self, condition: Callable[[], object], limit: float) -> bool:
        """Wait until a condition holds; False where the command ended, or the time, before."""
        end = time.monotonic() + limit
        while not condition():
            if self.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def sleep(self, seconds: float) -> None:
        """Let it run on; returns at its end."""
        self.until(lambda: False, seconds)

    def send(self, number: int, pid: int | None = None) -> None:
        if self.poll() is None:
            _send(pid or self.pid, number)

    def wait(self, limit: float) -> bool:
        """Wait for the end of the command and of every process it started; False if that takes too long."""
        end = time.monotonic() + limit
        while self.poll() is None or self.others():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS if self.status is None else 0.05)
        return True

    def others(self) -> list[int]:
        """The live processes that the command has started."""
        return sorted({*marked(self._mark)} - {self.pid})

    def workers(self) -> list[int]:
        """Process ids of a launcher's live workers."""
        return [pid for pid in marked(self._mark) if any(one.startswith(b"RANK=") for one in _environment(pid))]

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.others():
            _send(pid, signal.SIGKILL)
        if self.status is None:
            _send(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL


def start(
    argv: Sequence[str],
    output: Path,
    *,
    folder: Path,
    mark: str,
    variables: Mapping[str, str] | None = None,
    disturbed: dict[str, Any] | None = None,
    inside: Callable[[], object] | None = None,
    fresh: bool = False,
) -> Running:
    """Start ``gptpar ARGV``.

    Args:
        folder: where it runs.
        mark: tells its processes from all others.
        variables: of its environment, beside this process's own.
        disturbed: how its file operations are disturbed; see :mod:`tests.faults.hook.disturb`.
        inside: called in the new process, just before the command: sets limits, a mask, or other users.
        fresh: whether the command gets an interpreter of its own, because it depends on how Python starts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    output.touch()
    pid = os.fork()
    if pid:
        return Running(pid, output, mark)
    status = 70
    try:
        atexit._clear()  # what the suite is to do at its end, such as removing the folder of all runs
        _become(output, folder)
        os.environ.update({MARK: mark, **(variables or {})})
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        os.environ["PYTHONPATH"] = f"{HOOK}{os.pathsep}{ROOT}"
        if disturbed is not None:
            os.environ[disturb.VARIABLE] = json.dumps(disturbed)
            disturb.install(disturbed)
        if inside is not None:
            inside()
        if fresh:
            os.execv(sys.executable, [sys.executable, "-m", "gptpar", *argv])
        status = _main(argv)
    finally:
        os._exit(status)


def _become(output: Path, folder: Path) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.chdir(folder)
    os.environ.pop(disturb.VARIABLE, None)


def _main(argv: Sequence[str]) -> int:
    """As ``python -m gptpar ARGV`` ends, but for taking the interpreter apart."""
    from gptpar.cli import main

    try:
        status = main(list(argv))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120  # as Python itself ends then
    return status


def asked(function: Callable[..., Any], *arguments: Any, limit: int = 60) -> Any:
    """What a function returns, computed in a forked process (it may start threads), which dies after ``limit`` seconds.

    Raises:
        Exception: what the function raised.
    """
    with ProcessPoolExecutor(1, FORK, initializer=signal.alarm, initargs=(limit,)) as pool:
        return pool.submit(function, *arguments).result()


def marked(mark: str) -> list[int]:
    """The live processes of a command, zombies not counted."""
    wanted = f"{MARK}={mark}".encode()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and wanted in _environment(entry)]


def _environment(pid: int | str) -> list[bytes]:
    """As ``NAME=value``."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
