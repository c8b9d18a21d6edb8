"""A worker dies in the middle of training: the run ends soon, and its last line says who died and where."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.e2e.commands import ENVIRONMENT, children, command

END_SECONDS = 60.0


def rank_of(pid: int) -> int | None:
    """RANK in a process's environment."""
    found = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else None


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    flags = "--train-iters 100000 --lr-decay-style constant --log-interval 1 --nproc-per-node 2"
    with (tmp_path / "stderr").open("w") as stderr:
        launcher = subprocess.Popen(
            command(flags), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
    try:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "iteration        5/" in line:
                break
        workers = {rank_of(pid): pid for pid in children(launcher.pid)}
        assert 1 in workers, (tmp_path / "stderr").read_text()
        start = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        launcher.stdout.read()
        assert launcher.wait(timeout=END_SECONDS) == 1 and time.monotonic() - start < END_SECONDS
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    message = (tmp_path / "stderr").read_text()
    last = message.splitlines()[-1]
    assert last.startswith("error: rank 1 was killed by SIGKILL, as Linux does"), message
    place = re.search(r"while it was at iteration (\d+), \w", last)
    assert place is not None and int(place[1]) >= 5, message
    assert "Traceback" not in message
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
