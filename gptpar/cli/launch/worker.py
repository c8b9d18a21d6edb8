"""What a worker knows of its launcher, and how it ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from gptpar.system.processes import is_running

LAUNCHER_VARIABLE = "GPTPAR_LAUNCHER"
"""Process id of the launcher, for its workers."""

PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent dies


def is_worker() -> bool:
    """Whether this process was started by torchrun or by a launcher of this package."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def end_with_launcher() -> None:
    """In a worker: a launcher that dies without a word (kill -9) is a request to stop; nobody else would make one.

    Between the two there may be a wrapper, a profiler or a script of the user. Linux tells of a parent's death alone.
    """
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, 0))
    if not launcher or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        is_gone = os.getppid() != launcher  # it died before it could be watched
    else:
        is_gone = not is_running(launcher)
    if is_gone:
        os.kill(os.getpid(), signal.SIGTERM)
