"""Several machines, each played by a launcher with a folder in memory of its own, of which one is lost."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptpar.checkpoint import latest
from gptpar.system.restart import MEMORY_VARIABLE
from tests.e2e.commands import command
from tests.e2e.quick_python import quick_python
from tests.e2e.recovery_runs import Finished, environment_with, run
from tests.e2e.test_multi_node import finish

FLAGS = "--train-iters 12 --global-batch-size 4 --save-interval 100 --no-async-save --zero-stage 1"
MIRROR = "--mirror-interval 3 --lr-decay-style constant --log-interval 1"

LOSES_A_MACHINE = """
if at == (0, 1, 8):
    import shutil
    for copy in memory.glob("iter_*"):
        shutil.rmtree(copy)
    os.kill(me, signal.SIGKILL)
"""
IS_LOST = """
if (rank, iteration) == (1, 8) and not os.path.exists("MARKER"):
    open("MARKER", "w").close()
    os.kill(int(os.environ["GPTPAR_LAUNCHER"]), signal.SIGKILL)
    os.kill(me, signal.SIGKILL)
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with quick_python() as executable:
        yield executable


def launch(python: Path | str, meeting: str, flags: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """``gptpar launch`` as one machine of two runs it."""
    words = f"--nnodes 2 --nproc-per-node 1 --max-restarts 1 {meeting}"
    _, module, package, *pretrain = command(flags)
    return subprocess.Popen(
        [python, module, package, "launch", *words.split(), module, package, *pretrain],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_machines_processes_die_with_its_memory(tmp_path: Path, python: Path) -> None:
    undisturbed = run(f"--nproc-per-node 2 {FLAGS}", tmp_path, "undisturbed")
    environment = environment_with(LOSES_A_MACHINE, tmp_path / "site")
    folder, meets = tmp_path / "run", f"--master-addr 127.0.0.1 --master-port {free_port()}"
    flags = f"{FLAGS} {MIRROR} --save {folder} --load {folder}"
    launchers = [launch(python, f"{meets} --node-rank {node}", flags, environment) for node in range(2)]
    said = finish(launchers, 150)
    assert [one.returncode for one in launchers] == [0, 0], "\n".join(said)
    assert "its own and its neighbour's files on each of 2 machines" in said[0]
    assert "restored the copy of iteration 6 in memory: 2 files" in said[0], said[0]
    assert re.findall(r"loaded \S+ \(iteration (\d+)\)", said[0]) == ["6"]
    done = Finished(0, said[0], [], folder)
    assert done.losses() == undisturbed.losses() and done.state() == undisturbed.state()
    killed = "restart 1 of 1: rank 1 was killed by SIGKILL, as Linux does to the largest process when memory is full"
    assert killed in said[1] and "iteration 8" in said[1] and "restart 1 took" in said[0], said[1]
    assert done.restarts() == [0] * 6 + [1] * 6


FAILS = """
if (rank, iteration) == (1, 8):
    raise GptparError("the data are damaged: mend them.")
"""


def test_a_final_error_is_not_repeated_and_the_copies_are_kept_on_all_machines(tmp_path: Path, python: Path) -> None:
    environment = environment_with(FAILS, tmp_path / "site")
    folder, meets = tmp_path / "run", f"--rdzv-backend c10d --rdzv-id f --rdzv-endpoint 127.0.0.1:{free_port()}"
    flags = f"{FLAGS} {MIRROR} --save {folder} --load {folder}"
    launchers = [launch(python, f"{meets} --rdzv-conf is_host={host}", flags, environment) for host in (1, 0)]
    said = finish(launchers, 150)
    kept = [
        found for one in said for found in re.findall(rf"iteration 6 in memory is kept.* {MEMORY_VARIABLE}=(\S+) ", one)
    ]
    try:
        assert [one.returncode for one in launchers] == [1, 1], "\n".join(said)
        assert sum(one.count("the data are damaged: mend them.") for one in said) == 1, "\n".join(said)
        assert len(set(kept)) == 2 and all(latest(one) is not None for one in kept), "\n".join(said)
    finally:
        for one in kept:
            shutil.rmtree(one)


@pytest.mark.long
def test_another_machine_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    undisturbed = run(f"--nproc-per-node 2 {FLAGS}", tmp_path, "undisturbed")
    environment = environment_with(IS_LOST.replace("MARKER", str(tmp_path / "lost")), tmp_path / "site")
    folder, meets = tmp_path / "run", f"--rdzv-backend c10d --rdzv-id a --rdzv-endpoint 127.0.0.1:{free_port()}"
    flags = f"{FLAGS} {MIRROR} --save {folder} --load {folder}"
    launchers = [launch(sys.executable, f"{meets} --rdzv-conf is_host={host}", flags, environment) for host in (1, 0)]
    deadline = time.monotonic() + 100
    while not any(one.poll() for one in launchers) and time.monotonic() < deadline:
        time.sleep(0.1)
    launchers.append(launch(sys.executable, f"{meets} --rdzv-conf is_host=0", flags, environment))
    said = finish(launchers, 150)
    assert [one.returncode for one in launchers] == [0, -signal.SIGKILL, 0], "\n".join(said)
    told = said[0] + said[2]
    assert "restored the copy of iteration 6 in memory: 2 files" in told, told
    assert re.findall(r"loaded \S+ \(iteration (\d+)\)", told) == ["6"]
    done = Finished(0, told, [], folder)
    assert done.losses() == undisturbed.losses() and done.state() == undisturbed.state()
