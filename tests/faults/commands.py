"""``gptpar`` commands as real processes that cost no start-up: forked from this one, which has imported everything.

Workers that a launcher starts are ordinary Python processes. A process that forks must have no other threads.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.hook import disturb

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(disturb.__file__).parent
MARK = "GPTPAR_TEST_FAULT"
"""Variable by which all processes of a command are found, whoever started them."""

PIDS = "GPTPAR_TEST_PIDS"
"""Variable that names the folder where forked workers' process ids are noted, by rank."""

MAX_MEMORY_BYTES = 12 << 30
"""Address space of a command: one that reads a device for ever must not take the machine's memory."""

POLL_SECONDS = 0.004


def preload() -> None:
    """Import what the verbs need, once for all commands."""
    import tensorboard  # noqa: F401
    import torch.distributed.run  # noqa: F401

    import gptpar.__main__
    import gptpar.cli.evaluate
    import gptpar.cli.generate
    import gptpar.cli.inspect
    import gptpar.cli.plot
    import gptpar.cli.preprocess
    import gptpar.cli.pretrain
    import gptpar.cli.runs
    import gptpar.cli.summary  # noqa: F401

    assert threading.active_count() == 1


class Running:
    """A command under way, or ended.

    Attributes:
        pid: its process's; the process leads a session of its own.
        status: exit status, negative after a signal; ``None`` before :meth:`wait` has seen the end.
    """

    def __init__(self, pid: int, output: Path, mark: str, pids: Path):
        self.pid, self._output, self._mark, self._pids = pid, output, mark, pids
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
            try:
                os.kill(pid or self.pid, number)
            except ProcessLookupError:
                return

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
        return sorted({*marked(self._mark), *(pid for pid in self._forked() if _is_alive(pid))} - {self.pid})

    def workers(self) -> list[int]:
        """Process ids of a launcher's live workers."""
        started = [pid for pid in marked(self._mark) if "RANK" in _environment(pid)]
        return sorted({*started, *(pid for pid in self._forked() if _is_alive(pid))})

    def _forked(self) -> list[int]:
        texts = [file.read_text() for file in self._pids.iterdir()] if self._pids.is_dir() else []
        return [int(text) for text in texts if text]

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.others():
            _kill(pid)
        if self.status is None:
            _kill(self.pid)
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
    file_limit: int | None = None,
    forked_workers: bool = True,
) -> Running:
    """Start ``gptpar ARGV``.

    Args:
        folder: where it runs.
        mark: tells its processes from all others.
        variables: of its environment, beside this process's own.
        disturbed: how its file operations are disturbed; see :mod:`tests.faults.hook.disturb`.
        file_limit: bytes beyond which no file may grow (EFBIG).
        forked_workers: whether the workers of a launcher are forked from it, which saves their start-up.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    output.touch()
    pids = Path(tempfile.mkdtemp(prefix="pids-", dir=folder))
    pid = os.fork()
    if pid:
        return Running(pid, output, mark, pids)
    status = 70
    try:
        atexit._clear()  # what the suite is to do at its end, such as removing the folder of all runs
        _become(output, folder)
        os.environ.update({MARK: mark, PIDS: str(pids), **(variables or {})})
        if forked_workers:
            import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as torchrun

            torchrun.Popen = ForkedWorker  # type: ignore[assignment, misc]
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        os.environ["PYTHONPATH"] = f"{HOOK}{os.pathsep}{ROOT}"
        if disturbed is not None:
            os.environ[disturb.VARIABLE] = json.dumps(disturbed)
            disturb.install(disturbed)
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        status = _main(argv)
    finally:
        os._exit(status)


class ForkedWorker:
    """Stands in for ``subprocess.Popen`` in torchrun: a worker is forked from its launcher instead of started anew.

    The launcher is its parent, as of a real one. It leads a session of its own, too.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any):
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            (Path(env[PIDS]) / env["RANK"]).write_text(str(self.pid))
            return
        status = 70
        try:
            os.setsid()
            os.environ.clear()
            os.environ.update(env)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            disturb.from_environment()
            from gptpar.cli.launch import end_with_launcher

            end_with_launcher()
            status = _main(list(args)[list(args).index("gptpar") + 1 :])
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


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


def asked(function: Callable[..., Any], *arguments: Any, limit: float = 60.0) -> Any:
    """What a function returns, as JSON values, computed in a forked process (it may start threads).

    Raises:
        RuntimeError: it raised; with its traceback.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        signal.alarm(int(limit))
        try:
            answer = json.dumps([True, function(*arguments)])
        except BaseException:
            answer = json.dumps([False, traceback.format_exc()])
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    worked, answer = json.loads(text) if text else (False, "it died")
    if not worked:
        raise RuntimeError(answer)
    return answer


def marked(mark: str) -> list[int]:
    """The live processes of a command, zombies not counted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
