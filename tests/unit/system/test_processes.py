"""Which processes a process has started, whatever they are called."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gptpar.system.processes import Process, children, descendants, is_running, is_stopped

NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)  # PR_SET_NAME
print("named", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[b"\xff", b") Z 1 ("], ids=["no text", "like a state"])
def child(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of a child with an odd name: a process may choose any bytes for its name."""
    command = [sys.executable, "-c", NAMED.format(name=request.param)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline() == b"named\n"
        yield started.pid
        started.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_childs_name_hides_no_process(child: int) -> None:
    assert child in children(os.getpid()) and child in descendants(os.getpid())
    assert is_running(child) and not is_stopped(child)
    assert descendants(child) == [] and children(child) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_has_ended_is_no_child() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert ended.pid not in descendants(os.getpid()) and not is_running(ended.pid)
    this = Process.this()
    assert this.is_local() and this.is_alive() and (this.pid, len(this.started) > 0) == (os.getpid(), True)
