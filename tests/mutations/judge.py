"""Runs the tests of a mutation with pytest, in a fork of this process, which has imported torch and other packages."""

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.mutation import ROOT, Mutation

COPIED = ("gptpar", "csrc", "tests", "tools", "benchmarks", "examples", "pyproject.toml", "README.md", "docs")
OURS = ("gptpar", "tests")
IMPORTED = (
    *("pytest", "torch", "torch.distributed.run", "torch.utils.checkpoint", "torch._dynamo", "numpy", "tensorboard"),
    *("matplotlib.pyplot", "sentencepiece", "einops", "regex", "tiktoken"),
)
"""Other packages that tests import."""
POLL_S = 0.05


@dataclass(frozen=True)
class Task:
    """Tests to run in a copy of the checkout, with a mutation or with none.

    Attributes:
        mutation: the change to the copy; ``None``: the copy is unchanged.
        arguments: arguments of pytest.
        limit_s: seconds after which the tests count as hung.
    """

    mutation: Mutation | None
    arguments: Sequence[str]
    limit_s: float = 600.0


@dataclass(frozen=True)
class Verdict:
    """The outcome of a task.

    Attributes:
        status: pytest's exit status; ``None`` if pytest did not end in time, negative after a signal.
        failure: id and error of the first failed test; without one, the last line of the output.
        seconds: time that the tests took.
    """

    status: int | None
    failure: str
    seconds: float


def preload() -> None:
    """Import packages that no mutation changes, once for all tasks."""
    for name in IMPORTED:
        importlib.import_module(name)


def judge_all(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Verdict]]:
    """Run the tests of each task in a fresh copy of the checkout, ``jobs`` at a time; yields them as they end."""
    waiting, running = list(reversed(tasks)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Running(waiting.pop()))
        time.sleep(POLL_S)
        for one in list(running):
            if (verdict := one.poll()) is not None:
                running.remove(one)
                yield one.task, verdict


class _Running:
    """A task under way, seen from the process that forked it."""

    def __init__(self, task: Task):
        self.task, self._started = task, time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="gptpar-mutation-")
        self._copy, self._output = Path(self._folder.name, "checkout"), Path(self._folder.name, "output")
        for name in COPIED:  # compiled files stay valid: only the mutated file has a new time
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            (self._copy / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, self._copy / name)
        if task.mutation is not None:
            task.mutation.inject(self._copy)
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _be_pytest(task.arguments, self._copy, self._output)

    def poll(self) -> Verdict | None:
        """The verdict, once there is one."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._started
        if not ended and seconds < self.task.limit_s:
            return None
        if not ended:
            os.killpg(self._pid, signal.SIGKILL)  # also ends processes that a test has started
            os.waitpid(self._pid, 0)
        output = self._output.read_text(errors="replace")
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        last = output.strip().splitlines()[-1:]
        self._folder.cleanup()
        return Verdict(
            os.waitstatus_to_exitcode(status) if ended else None, (failures or last or ["no output"])[0], seconds
        )


def _be_pytest(arguments: Sequence[str], copy: Path, output: Path) -> None:
    """In the child: run the copy's tests with pytest, and exit."""
    status = 70
    try:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        # The user's cache keeps compiled helpers by the hash of their source: a mutation in csrc is built anew.
        os.environ.update(PYTHONPATH=str(copy), COLUMNS="400")
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.argv = ["pytest"]
        import pytest

        status = pytest.main(["-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments])
        sys.stdout.flush()
    finally:
        os._exit(status)
