"""The entry point of ``python -m gptpar VERB ...``: runs the verb, and ends worker processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gptpar.cli import main
from gptpar.cli.launch.worker import end_with_launcher, is_worker


def leave(status: int) -> NoReturn:
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


def run_as_program(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: this process's) and end the process with its status.

    A worker that raises ends at once, too: taking the interpreter apart takes seconds while other processes wait in a
    collective, and only its end tells the launcher of the failure.
    """
    if not is_worker():
        raise SystemExit(main(argv))
    end_with_launcher()
    try:
        status = main(argv)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave(status)


if __name__ == "__main__":
    run_as_program()
