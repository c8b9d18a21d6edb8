"""The entry point of ``python -m gptpar VERB ...``: runs the verb, and ends worker processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from gptpar.cli import main
from gptpar.cli.launch import is_worker
from gptpar.cli.launch.worker import end_with_launcher
from gptpar.system.quiet_end import leave


def run_as_program(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: this process's) and end the process with its status.

    A worker that raises ends at once, too: taking the interpreter apart takes seconds while other processes wait in a
    collective, and only its end shows the launcher the failure.
    """
    if not is_worker():
        raise SystemExit(main(argv))
    end_with_launcher()
    try:
        status = main(argv, end=leave)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave(status)


if __name__ == "__main__":
    run_as_program()
