"""Forks workers from a process that has imported everything, so that a restart needs no imports.

Importing torch and gptpar takes seconds, on a busy machine most of a restart. Forking a process that has imported them
takes hundredths of a second. Forking is dangerous where a fork copies only half of a state: threads (the copy has one
thread, and locks that other threads held stay locked) and CUDA (its driver refuses a copied context). Therefore the
template starts no thread and never asks CUDA. Its fork checks both; otherwise the fork becomes a new interpreter, which
only takes longer. An environment variable keeps numpy from starting threads.

A worker is a grandchild of the template whose parent ends at once. It becomes a child of the launcher, which asked
Linux for the orphans below it. So the launcher can wait for the worker, and the launcher's death is the death of the
worker's parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gptpar.cli.launch.program import Program, interpreter
from gptpar.cli.launch.worker import PR_SET_PDEATHSIG

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
ADOPTED_SECONDS = 10.0

REPLY_SECONDS = 300.0
"""Time for which the launcher waits for a fork, at first with all imports; a stopped template never replies."""

_SERVE = f"import sys; from {__name__} import serve; serve(*map(int, sys.argv[1:])).run_and_leave()"


class Template:
    """The launcher's side.

    Args:
        program: what the workers run.
        modules: modules to import before the forks; a missing one is left out.
        environment: of all workers; variables that libraries read when they are loaded cannot change later.
    """

    def __init__(self, program: Program, modules: Sequence[str], environment: Mapping[str, str]):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(REPLY_SECONDS)
        self._replies = self._socket.makefile("r")
        with theirs:
            self._process = subprocess.Popen(
                [*interpreter(), "-c", _SERVE, str(theirs.fileno()), str(os.getpid())],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._send({"modules": list(modules), "kind": program.kind, "name": program.name, "words": program.words})

    def start(self, environment: Mapping[str, str]) -> int:
        """A new worker's process id.

        Raises:
            OSError: the template is gone, or does not reply; :meth:`end` it, so that no late fork comes.
        """
        self._send(dict(environment))
        reply = self._replies.readline()
        if not reply:
            raise ConnectionResetError("the process that forks the workers is gone")
        return int(reply)

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the template; its workers stay, but for one that has not reported itself yet."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()

    def _send(self, value: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")


def serve(file: int, launcher: int) -> Program:
    """The template's side: fork a worker for each request; returns in the worker, which then runs the program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.set_inheritable(
        file, False
    )  # a worker that becomes a new interpreter would keep the launcher waiting for replies
    with socket.socket(fileno=file) as connection, connection.makefile("r") as requests:
        first = requests.readline()
        if not first:  # the launcher has ended without a worker
            os._exit(0)
        said = json.loads(first)
        program = Program(said["kind"], said["name"], tuple(said["words"]))
        for name in said["modules"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for line in requests:
            alone = len(os.listdir("/proc/self/task")) == 1
            if child := os.fork():
                os.waitpid(child, 0)
            elif os.fork():
                os._exit(0)
            else:
                _become_worker(json.loads(line), connection, launcher)
                if not alone or _has_asked_cuda():
                    command = program.command(os.environ)
                    os.execvp(command[0], command)
                return program
    os._exit(0)


def _become_worker(environment: dict[str, str], connection: socket.socket, launcher: int) -> None:
    """Get the environment, session, name and random numbers of a new process."""
    deadline = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > deadline:  # the launcher is gone
            os._exit(1)
        time.sleep(0.001)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"gptpar rank {environment['RANK']}".encode())
    try:
        connection.sendall(f"{os.getpid()}\n".encode())
    except OSError:  # the launcher has given the template up, and starts this worker by itself
        os._exit(1)
    if "numpy" in sys.modules:  # Python's own generator and torch's see to themselves
        sys.modules["numpy"].random.seed()


def _has_asked_cuda() -> bool:
    """Whether the template, whose fork this is, had used CUDA, so that the fork cannot use it."""
    torch = sys.modules.get("torch")
    asked = getattr(torch and torch._C, "_cuda_isInBadFork", lambda: False)
    return bool(asked())
