"""The process that forks workers dies, or stops, between two of them: the launcher goes on without it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptpar.cli.launch import template as template_module
from gptpar.cli.launch.program import Program
from gptpar.cli.launch.template import Template
from gptpar.system.processes import is_running

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
WORKER = "import os, pathlib, time\npathlib.Path(__file__).with_name(os.environ['RANK']).touch()\ntime.sleep(30)\n"


@pytest.fixture(params=["json", "with_a_thread"], ids=["forked", "a new interpreter"])
def template(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Template]:
    """Its workers touch a file named by their rank, and live for a while."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "with_a_thread.py").write_text(THREAD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with Template(Program("script", str(tmp_path / "worker.py"), ()), (request.param,), environment) as made:
        yield made


def start(template: Template, rank: int) -> int:
    return template.start({**os.environ, "RANK": str(rank)})


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + 20
    while not path.exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert path.exists()


def test_a_template_that_was_killed_after_a_fork_is_missed_at_once(template: Template, tmp_path: Path) -> None:
    worker = start(template, 0)
    try:
        wait_for(tmp_path / "0")
        os.kill(template._process.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(OSError):
            start(template, 1)
        assert time.monotonic() - begun < 5  # not as long as the first worker lives
        assert is_running(worker) and not (tmp_path / "1").exists()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_template_that_was_stopped_is_given_up_and_forks_nobody_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "REPLY_SECONDS", 1.0)
    (tmp_path / "worker.py").write_text(WORKER)
    made = Template(Program("script", str(tmp_path / "worker.py"), ()), (), os.environ)
    os.kill(made._process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="timed out"):
        start(made, 0)
    made.end()
    time.sleep(0.5)
    assert not is_running(made._process.pid) and not (tmp_path / "0").exists()
