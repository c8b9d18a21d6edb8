"""``python -m gptpar VERB ...``"""

from __future__ import annotations

import atexit
import os
import sys

from gptpar.cli import main
from gptpar.launch import is_worker


def leave(status: int) -> None:
    """End a worker whose work is done without taking the interpreter apart.

    Threads of gloo and NCCL may still be letting go of tensors. One that asks for Python's lock while the interpreter
    is being taken apart ends the process with SIGABRT, and torchrun then calls a finished run failed (1 of 42 tiny runs
    on a busy machine).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    status = main()
    if is_worker():
        leave(status)
    raise SystemExit(status)
