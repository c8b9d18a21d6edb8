"""Runs a command in processes of its own, for a limited time, and returns its result or why it has none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptpar.system.processes import descendants
from gptpar.system.stop import handling

GRACE_S = 15.0
"""Time between the end of the workers and that of the process that started them, which cleans up after them."""
MAX_CHARACTERS = 100
"""The longest reason in the table, in characters."""


@dataclass(frozen=True)
class Completed:
    """The outcome of a command.

    Attributes:
        result: the last JSON object that it printed; ``None`` if it failed.
        failure: a few words; empty if it did not.
        seconds: how long it took.
    """

    result: dict[str, Any] | None
    failure: str = ""
    seconds: float = 0.0


def run_command(command: Sequence[str], timeout: float, *, wants_result: bool = True) -> Completed:
    """Run a command; after Ctrl-C, or at the end of its time, all its processes are ended.

    Args:
        timeout: seconds.
        wants_result: whether a command that prints no JSON object has failed.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own, so that a terminal's Ctrl-C reaches this process alone, which then ends the others.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                _end(process)
        seconds = time.monotonic() - started
        if late:
            return Completed(None, f"stopped after {timeout:g} s", seconds)
        output.seek(0)
        text = output.read()
    if process.returncode:
        return Completed(None, reason(text, process.returncode), seconds)
    result = last_json(text)
    return Completed(result, "" if result or not wants_result else "it printed no JSON line", seconds)


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return None


def reason(output: str, status: int) -> str:
    """Why a command failed, in a few words.

    Args:
        status: as subprocess returns it; negative for a signal.
    """
    if re.search(r"OutOfMemoryError|(cuda|hip)[^\n]*out of memory", output, re.IGNORECASE):
        return "out of GPU memory"
    if status == -signal.SIGKILL or "was killed by SIGKILL" in output:
        return "killed by SIGKILL, as when the machine's memory is full"
    # Of a worker's error and the launcher's message about it, the first says more.
    own = [line for line in output.splitlines() if line.startswith("error: ") and "ended with exit code" not in line]
    raised = re.findall(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", output, re.MULTILINE)
    text = [line.removeprefix("error: ") for line in own] + raised
    return text[0][:MAX_CHARACTERS].rstrip(" .:") if text else f"exit status {status}"


def terminated_like_ctrl_c() -> contextlib.AbstractContextManager[None]:
    """A context in which SIGTERM acts as Ctrl-C: running processes, which have sessions of their own, are ended."""
    return handling(signal.default_int_handler, [signal.SIGTERM])


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a JSON line to a file, which need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started; these have sessions of their own, and may ignore signals."""
    workers = descendants(process.pid)
    for worker in workers:
        _kill(worker)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S if workers else 0)
    if process.poll() is None:
        for left in [*descendants(process.pid), process.pid]:
            _kill(left)
        process.wait()


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
