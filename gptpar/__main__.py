"""``python -m gptpar VERB ...``"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from gptpar.cli import main
from gptpar.cli.launch import end_with_launcher, is_worker


def leave(status: int) -> None:
    """End a worker whose work is done without taking the interpreter apart.

    Threads of gloo and NCCL may still be letting go of tensors. One that asks for Python's lock while the interpreter
    is being taken apart ends the process with SIGABRT, and torchrun then calls a finished run failed (1 of 42 tiny runs
    on a busy machine).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    if is_worker():
        end_with_launcher()
    status = main()
    if is_worker():
        leave(status)
    raise SystemExit(status)
