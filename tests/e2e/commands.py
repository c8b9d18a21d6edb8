"""Commands as a user types them."""

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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


def command(flags: str, verb: str = "pretrain") -> list[str]:
    return [sys.executable, "-m", "gptpar", verb, *(TINY if verb == "pretrain" else "").split(), *flags.split()]


def gptpar(flags: str, verb: str = "pretrain", expect: int = 0) -> str:
    """What a command prints; see :func:`said_by`."""
    return said_by(command(flags, verb)[3:], expect)


def said_by(words: Sequence[str], expect: int = 0, folder: Path | None = None) -> str:
    """What ``gptpar WORDS`` prints, on stdout and then on stderr.

    Its process is a fork, which saves its start-up, and so are workers that it starts.

    Args:
        expect: the exit code that it must have.
        folder: where it runs.
    """
    return said_in_fork(main, words, expect, folder)


def said_by_program(path: Path, *words: object, expect: int = 0) -> str:
    """What a program of Python prints, which runs in its own folder and in a fork; see :func:`said_by`."""
    return said_in_fork(run_program, [str(path), *map(str, words)], expect, path.parent)


def said_in_fork(act: Callable[[Any], Any], argument: Any, expect: int, folder: Path | None) -> str:
    """What a function prints, whose result is its process's exit code; see :func:`said_by`."""
    with tempfile.TemporaryDirectory(prefix="gptpar-command-") as output:
        files = [Path(output, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        process = FORKED.Process(target=_run, args=(act, argument, files, ENVIRONMENT, folder))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        said = "".join(file.read_text() for file in files)
    assert process.exitcode == expect, said
    return said


def run_program(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _run(
    act: Callable[[Any], Any], argument: Any, files: Sequence[Path], environment: dict[str, str], folder: Path | None
) -> None:
    """In the child: be a command in the environment of commands."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
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
            program = serve(theirs.detach(), launcher)
            torch.set_num_threads(1)  # after the last fork: a fork loses torch's pool, and threads race to renew it
            program.run_and_leave()
        theirs.close()
        templates.append(ForkedTemplate(ours, pid))
    LaunchJob.is_forked = property(lambda job: bool(templates) and job.program.kind != "executable")  # type: ignore[assignment]
    supervisor.Template = lambda *given: templates.pop().begin(*given)  # type: ignore[assignment,misc]


def stepping(words: list[str], taken: int) -> subprocess.Popen[str]:
    """A run in a process group of its own after so many steps; what it prints from then on is in its ``stdout``."""
    process = subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if f"iteration {taken:8d}/" in line:
            break
    return process


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["lm_loss"] for line in lines]


def children(pid: int) -> list[int]:
    """The live child processes of a process, as Linux lists them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())
