"""Ends a process although threads of C++ libraries may still work.

A thread that asks for Python's lock while the interpreter is taken apart ends the finished process with SIGABRT
("terminate called without an active exception"). A thread of gloo may: it drops its last reference to a tensor a moment
after the training loop knows that the collective is complete. A program that :mod:`gptpar.cli.launch` starts ends by
:func:`leave`. Under another launcher, :func:`wait_at_exit` makes the abort less likely.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

LOOK_SECONDS = 1e-3
"""Between two looks; a thread that waits for Python's lock gets it meanwhile."""

PATIENCE_SECONDS = 1.0
"""A thread that still runs after this time computes something of its own, and has no part in this."""

NUM_QUIET_LOOKS = 3
"""Number of looks in a row at which no thread may run."""

TASKS = Path("/proc/self/task")
"""Linux: a folder for each thread."""


def leave(status: int) -> NoReturn:
    """End a process whose work is done without taking the interpreter apart, which also takes seconds.

    What a program may rely on happens: threads that are no daemons end, handlers of ``atexit`` run, and what open files
    hold is written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    files = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    for file in sorted([*files, sys.stdout, sys.stderr], key=lambda file: not isinstance(file, io.TextIOBase)):
        with contextlib.suppress(OSError, ValueError):  # a terminal may be gone, a file closed
            file.flush()
    os._exit(status)


def wait_at_exit() -> None:
    """Let this process end quietly: other threads sleep, and gloo's have ended, while they can get Python's lock."""
    _WAITS.set()


_WAITS = threading.Event()


@atexit.register  # with the import: the program's handlers, which may need its groups, are later ones and run before
def _end_quietly() -> None:
    if not _WAITS.is_set():
        return
    quiet_threads()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        quiet_threads()


def quiet_threads() -> bool:
    """Wait until all other threads of this process sleep.

    Returns:
        Whether they do; False after ``PATIENCE_SECONDS``, and where the system does not tell.
    """
    quiet, until = 0, time.monotonic() + PATIENCE_SECONDS
    while TASKS.exists() and quiet < NUM_QUIET_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        quiet = 0 if _another_thread_runs() else quiet + 1
    return quiet == NUM_QUIET_LOOKS


def _another_thread_runs() -> bool:
    own = str(threading.get_native_id())
    return any(_state(task) == "R" for task in TASKS.iterdir() if task.name != own)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended
        return ""
