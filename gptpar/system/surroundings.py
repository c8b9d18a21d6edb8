"""What a process needs of its surroundings before it opens files: standard streams, a working folder, descriptors."""

from __future__ import annotations

import io
import os
import resource
import sys

from gptpar.errors import GptparError

MIN_OPEN_FILES = 64
"""A tiny run on one process opens 40 files and sockets at once."""

OPEN_FILES = 4096
"""More than corpora of many files and connections to many processes need."""


def prepare_process() -> None:
    """Mend the surroundings where that is possible.

    Raises:
        GptparError: the working folder was removed, or too few files may be open at once.
    """
    open_standard_streams()
    _require_working_folder()
    _require_open_files()


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that were closed.

    The next file that is opened would get a closed stream's number, and what libraries print would be written into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may know fewer letters than a path or a text has
        sys.stdout.reconfigure(errors="backslashreplace")


def _require_working_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        raise GptparError("the current folder was removed: change to another one (cd), and start again.") from None


def _require_open_files() -> None:
    """Raise this process's limit of open files as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        raise GptparError(
            f"{soft} files may be open at once, and {MIN_OPEN_FILES} are needed: raise the limit "
            f"(ulimit -n {OPEN_FILES})."
        )
