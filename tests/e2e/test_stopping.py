"""A run is asked to stop as machines and people do it; what it has learnt is on the disk afterwards."""

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from gptpar.checkpoint import load_meta
from tests.e2e.commands import ENVIRONMENT, ROOT, command

LONG = "--train-iters 100000 --lr-decay-style constant --log-interval 1 --save"
# The first piece of a checkpoint takes longer than torchrun waits, as on a slow disk.
TORCHRUN_WAITS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
SLOW_SAVE = """
import os, time
if "RANK" in os.environ:
    from gptpar.checkpoint.data_file import DataFile
    write, slept = DataFile.write, []
    def slow(*arguments):
        if not slept:
            slept.append(time.sleep(1.5))
        return write(*arguments)
    DataFile.write = slow
"""


def test_a_closed_terminal_saves_and_stops_however_long_it_takes(tmp_path: Path) -> None:
    """SIGHUP comes, and from then on every word that is printed is an error.

    torchrun would wait 30 seconds, and here 1, from the signal to SIGKILL.
    """
    (tmp_path / "sitecustomize.py").write_text(SLOW_SAVE)
    (tmp_path / "tmp").mkdir()
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path / "tmp")}
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *command(f"{LONG} {tmp_path}/run --nproc-per-node 2")],
        env={**ENVIRONMENT, **TORCHRUN_WAITS, **paths},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    while b"iteration        3/" not in seen:
        seen = seen[-100:] + os.read(terminal, 4096)
    closed = time.monotonic()
    os.close(terminal)
    assert process.wait(timeout=60) == 129 and time.monotonic() - closed > 1.5
    assert load_meta(tmp_path / "run")["progress"]["iteration"] >= 3
    assert list((tmp_path / "tmp").iterdir()) == []


# Makes the terminal at stdin this session's own, and becomes the command.
CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


# As torchrun starts its workers; itself it would only take longer to start.
STARTS_WORKERS = """
import os, subprocess, sys
common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GPTPAR_LAUNCHER": str(os.getpid())}
workers = [
    subprocess.Popen(sys.argv[2:], env={**os.environ, **common, "MASTER_PORT": sys.argv[1], "RANK": r, "LOCAL_RANK": r})
    for r in "01"
]
for worker in workers:
    worker.wait()
"""


def test_workers_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launched = [sys.executable, "-c", STARTS_WORKERS, port, *command(f"{LONG} {tmp_path}")]
    process = subprocess.Popen(launched, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if "iteration        3/" in line)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(workers) == 2
    reader = threading.Thread(target=process.stdout.read)
    process.kill()
    reader.start()
    reader.join(timeout=60)  # they hold its other end
    assert not reader.is_alive()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert load_meta(tmp_path)["progress"]["iteration"] >= 3


def _is_zombie(pid: int) -> bool:
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


# No shell: a shell's background job ignores SIGINT for good.
FAKE_LAUNCHER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"SIGTERM\\n"))  # print is not to be entered twice
signal.signal(signal.SIGINT, lambda *_: (os.write(1, b"SIGINT\\n"), sys.exit(130)))
print("ready", flush=True)
while True:
    time.sleep(0.1)  # a signal between its handler's end and a sleep's continuation is seen when the sleep ends
"""
FAKE_SSH = """#!/usr/bin/env bash
shift 3 # -o BatchMode=yes HOST
launch='"$PYTHON" -m gptpar launch'
exec bash -c "${*/"$launch"/"$FAKE_LAUNCHER"}"
"""


def test_a_hostfiles_hosts_save_after_one_ctrl_c_and_end_at_once_after_two(tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text(FAKE_LAUNCHER)
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("here slots=2\nthere slots=2\n")
    process = subprocess.Popen(
        ["bash", str(ROOT / "examples/launch_hostfile.sh"), str(tmp_path / "hosts")],
        env={
            **ENVIRONMENT,
            "PYTHON": sys.executable,
            "SSH": str(tmp_path / "ssh"),
            "FAKE_LAUNCHER": f"{sys.executable} {tmp_path}/launcher",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen: list[str] = []

    def read_until(word: str) -> None:
        while sum(word in line for line in seen) < 2:
            line = process.stdout.readline()
            assert line, seen
            seen.append(line)

    try:
        for word, number in (("ready", signal.SIGINT), ("SIGTERM", signal.SIGINT)):
            read_until(word)
            process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(timeout=120) == 130, seen
    finally:
        if process.poll() is None:
            process.kill()
    text = "".join([*seen, rest])
    assert "stopping all hosts; each saves first" in text and "stopping all hosts at once" in text
    assert {f"{host}: {word}" for host in ("here", "there") for word in ("SIGTERM", "SIGINT")} <= set(text.splitlines())
