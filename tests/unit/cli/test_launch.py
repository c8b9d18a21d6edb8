"""How a launcher ends: what it passes on, how long it waits, what it says and what it leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptpar.cli import launch
from gptpar.cli.launch import relay
from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.program import Program
from gptpar.errors import GptparError
from gptpar.system.activity import START, Activity, last_activity
from gptpar.topology.world import world_from_environment

ROOT = Path(__file__).parents[3]
OURS = Program("module", "gptpar", ("pretrain",))


def test_a_worker_that_fails_on_the_way_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Activity(1, tmp_path).note("saving the checkpoint of iteration 7")
    its_relay = relay.Relay(tmp_path, 1.0, relay.Children(), OURS)
    its_relay.signal = signal.SIGTERM
    assert its_relay.exit_code(Failure(1, 1, last_activity(tmp_path, 1))) == 1
    told = "rank 1 ended with exit code 1 while it was at saving the checkpoint of iteration 7; its message is above"
    assert capsys.readouterr().err == f"error: stopped by SIGTERM, but {told}\n"
    assert its_relay.exit_code(None) == 143
    Activity(1, tmp_path).note(START)
    assert its_relay.exit_code(Failure(1, -signal.SIGTERM, last_activity(tmp_path, 1))) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM before there was anything to save\n"


def test_what_waits_to_fork_workers_ends_in_silence_where_its_launcher_ends_before_the_first() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    program = f"from gptpar.cli.launch.template import serve; serve({theirs.fileno()}, {os.getpid()})"
    command = [sys.executable, "-c", program]
    with theirs:
        done = subprocess.run(command, cwd=ROOT, pass_fds=[theirs.fileno()], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("holds", [False, True], ids=["first start", "restart"])
def test_workers_of_a_restart_have_something_to_save(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a request to stop meets in start-up are waited for: their state may lie in memory alone."""
    killed: list[int] = []
    monkeypatch.setattr(relay, "START_SECONDS", 0.0)
    monkeypatch.setattr(relay, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(relay, "send", lambda processes, number: killed.append(number) if processes else None)
    workers = SimpleNamespace(holds=holds, living=lambda: {1}, listening=set)
    its_relay = relay.Relay(tmp_path, 1000.0, workers, OURS)
    its_relay.signal = signal.SIGTERM
    watcher = threading.Thread(target=its_relay._watch)
    watcher.start()
    time.sleep(0.3)
    its_relay._ended.set()
    watcher.join()
    assert (signal.SIGKILL in killed) != holds


@pytest.mark.parametrize(
    ("size", "rank", "local", "others"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", {}),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
        ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", {"SLURM_PROCID": "1"}),
    ],
)
def test_processes_of_mpirun_or_srun_without_ranks_do_not_each_train_by_themselves(
    size: str, rank: str, local: str, others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**others, size: "1"}.items():
        monkeypatch.setenv(name, value)
    if "SLURM_NTASKS" not in others:
        assert world_from_environment() == (0, 0, 1)
    monkeypatch.setenv(size, "8")
    monkeypatch.setattr("torch.distributed.run.run", lambda words: None)
    one_on_each_machine = "--rdzv-endpoint node1:29500 --nnodes 2 --node-rank 1 x.py"
    assert launch.main(one_on_each_machine.split()) == 0
    refusing: list[Callable[[], object]] = [lambda: launch.start_workers(3, ["pretrain"]), world_from_environment]
    for flags in ("--standalone", "--nnodes 1:1 --rdzv-backend c10d", "--num-gpus 2"):
        refusing.append(partial(launch.main, [*flags.split(), "x.py"]))
    for refuses in refusing:
        with pytest.raises(GptparError) as caught:
            refuses()
        told = str(caught.value)
        assert f" started 8 processes ({size}) without RANK and WORLD_SIZE, so that each would train" in told
        assert f": export RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local} in each" in told
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world_from_environment() == (0, 0, 1)
