"""Commands as a user types them."""

import atexit
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gptpar.cli import main
from gptpar.cli.launch import supervisor
from gptpar.cli.launch.job import LaunchJob
from gptpar.cli.launch.program import Program
from gptpar.cli.launch.template import PR_SET_CHILD_SUBREAPER, REPLY_SECONDS, Template, serve
from tests.forked import FORKED
from tests.helpers import TINY

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 600.0


def words(flags: str, verb: str = "pretrain") -> list[str]:
    """After ``gptpar``; ``pretrain`` has the tiny model's before its own."""
    return [verb, *(TINY if verb == "pretrain" else "").split(), *flags.split()]


def command(flags: str, verb: str = "pretrain") -> list[str]:
    """Of a new interpreter."""
    return [sys.executable, "-m", "gptpar", *words(flags, verb)]


def gptpar(flags: str, verb: str = "pretrain", expect: int = 0) -> str:
    """What a command prints; see :func:`said_by`."""
    return said_by(words(flags, verb), expect)


def said_by(given: Sequence[str], expect: int = 0, folder: Path | None = None) -> str:
    """What ``gptpar GIVEN`` prints, on stdout and then on stderr.

    Its process is a fork, which saves its start-up, and so are workers that it starts.

    Args:
        expect: the exit code that it must have.
        folder: where it runs.
    """
    return said_in_fork(main, given, expect, folder)


def said_by_program(path: Path, *given: object, expect: int = 0) -> str:
    """What a program of Python prints, which runs in its own folder and in a fork; see :func:`said_by`."""
    return said_in_fork(run_program, [str(path), *map(str, given)], expect, path.parent)


def said_in_fork(act: Callable[[Any], Any], argument: Any, expect: int = 0, folder: Path | None = None) -> str:
    """What a function prints, whose result is its process's exit code; see :func:`said_by`."""
    code, *said = ended_fork(act, argument, folder=folder)
    assert code == expect, "".join(said)
    return "".join(said)


def ended_fork(
    act: Callable[[Any], Any],
    argument: Any,
    environment: Mapping[str, str] = ENVIRONMENT,
    folder: Path | None = None,
) -> tuple[int | None, str, str]:
    """The exit code of a function's process, and what it printed on stdout and on stderr."""
    with tempfile.TemporaryDirectory(prefix="gptpar-command-") as output:
        files = [Path(output, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        process = FORKED.Process(target=_run, args=(act, argument, files, environment, folder))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        return process.exitcode, *(file.read_text() for file in files)


class Started:
    """``gptpar GIVEN`` under way in a fork, which leads a session, as ``subprocess.Popen`` shows a command.

    Attributes:
        stdout: what it prints, on stderr too.
    """

    def __init__(self, given: Sequence[str], environment: Mapping[str, str] = ENVIRONMENT):
        said, theirs = FORKED.Pipe(duplex=False)
        self._process = FORKED.Process(target=_lead, args=(given, theirs, environment))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(said.fileno()))
        said.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Its exit code; ``None`` if it has not ended in time."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _lead(given: Sequence[str], pipe: Connection, environment: dict[str, str]) -> None:
    os.setsid()
    _run(main, given, [Path(f"/proc/self/fd/{pipe.fileno()}")] * 2, environment, None, pipe)


def run_program(given: list[str]) -> None:
    sys.argv = given
    sys.path.insert(0, str(Path(given[0]).parent))
    runpy.run_path(given[0], run_name="__main__")


def _run(
    act: Callable[[Any], Any],
    argument: Any,
    files: Sequence[Path],
    environment: Mapping[str, str],
    folder: Path | None,
    pipe: Connection | None = None,
) -> None:
    """In the child: be a command in the environment of commands."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    if pipe is not None:
        pipe.close()
    # Those of the server take a pipe for what its own were.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder or os.curdir)
    _fork_templates()
    torch.set_num_threads(1)  # the variable has been read already
    try:
        sys.exit(act(argument))
    finally:
        atexit._run_exitfuncs()


def customize() -> None:
    """Import ``sitecustomize`` of the folders in PYTHONPATH, as a new interpreter does."""
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(":")
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")


NUM_TEMPLATES = 3
"""As many times a command may start workers that are forks; later ones are ordinary processes."""


class ForkedTemplate(Template):
    """A launcher's template that was forked from this process before there were threads, so that it imports nothing."""

    def __init__(self, ours: socket.socket, pid: int):
        self._socket, self._pid = ours, pid

    def begin(self, program: Program, modules: Sequence[str], environment: Mapping[str, str]) -> "ForkedTemplate":
        """As :class:`Template` is made."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket.settimeout(REPLY_SECONDS)
        self._replies = self._socket.makefile("r")
        self._send({"modules": list(modules), "kind": program.kind, "name": program.name, "words": program.words})
        return self

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._replies.close()
        self._socket.close()


def _fork_templates() -> None:
    """Let a launcher fork its workers also where none is to be started again. Templates end with this process."""
    templates, launcher = [], os.getpid()
    for _ in range(NUM_TEMPLATES):
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            ours.close()
            os.setsid()
            program = serve(theirs.detach(), launcher)
            customize()
            torch.set_num_threads(1)  # after the last fork: a fork loses torch's pool, and threads race to renew it
            program.run_and_leave()
        theirs.close()
        templates.append(ForkedTemplate(ours, pid))
    LaunchJob.is_forked = property(lambda job: bool(templates) and job.program.kind != "executable")  # type: ignore[assignment]
    supervisor.Template = lambda *given: templates.pop().begin(*given)  # type: ignore[assignment,misc]


def stepping(given: Sequence[str], taken: int) -> Started:
    """``gptpar GIVEN`` after so many steps; what it prints from then on is in its ``stdout``."""
    process = Started(given)
    for line in process.stdout:
        if f"iteration {taken:8d}/" in line:
            break
    return process


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["lm_loss"] for line in lines]


def workers_of(pid: int) -> list[int]:
    """The live workers of a launcher, by rank."""
    children = [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    names = {Path(f"/proc/{child}/comm").read_text(): int(child) for child in children}
    return [names[name] for name in sorted(names) if name.startswith("gptpar rank")]
