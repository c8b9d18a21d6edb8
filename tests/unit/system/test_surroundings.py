"""Processes that are born without streams or descriptors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gptpar.system import command_line


def ran(words: list[str], folder: Path, inside: Callable[[], object], **variables: str) -> subprocess.CompletedProcess:
    """``gptpar WORDS`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), **variables}
    command = [sys.executable, "-m", "gptpar", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, preexec_fn=inside)


def test_closed_streams_become_the_null_device() -> None:
    pid = os.fork()
    if not pid:
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None  # as Python itself has it then
        command_line.open_standard_streams()
        print("to nowhere", flush=True)
        print("to nowhere", file=sys.stderr, flush=True)
        paths = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)}
        os._exit(0 if paths == {os.devnull} and os.open(__file__, os.O_RDONLY) > 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_too_few_open_files_are_told(tmp_path: Path) -> None:
    done = ran(["runs", "x"], tmp_path, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 40)))
    told = "error: 40 files may be open at once, and 64 are needed: raise the limit (ulimit -n 4096).\n"
    assert (done.returncode, done.stderr) == (1, told)
