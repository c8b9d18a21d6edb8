"""Passes a worker the launcher that started it, and ends the worker after the launcher's death."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from gptpar.system.processes import is_running

LAUNCHER_VARIABLE = "GPTPAR_LAUNCHER"
"""Process id of the launcher, for its workers."""

PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent dies


def end_with_launcher() -> None:
    """Let a worker take the launcher's death (kill -9) as a request to stop.

    This works if the launcher is the worker's parent, because Linux reports the death of a parent alone. Between the
    two there may be a wrapper, a profiler or a script of the user; then only a launcher that is dead already counts.
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
