"""How a launcher ends: what it passes on, how long it waits, what it says and what it leaves behind."""

import signal
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

OURS = Program("module", "gptpar", ("pretrain",))


SEVERAL = ["--nnodes", "2", "--node-rank", "1", "x.py"]


def test_a_worker_that_fails_on_the_way_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Activity(1, tmp_path).note("saving the checkpoint of iteration 7")
    its_relay = relay.Relay(tmp_path, 1.0, relay.Children(), OURS)
    its_relay.signal = signal.SIGTERM
    assert its_relay.exit_code(Failure(1, 1, last_activity(tmp_path, 1))) == 1
    place = "while it was at saving the checkpoint of iteration 7"
    assert capsys.readouterr().err == (
        f"error: stopped by SIGTERM, but rank 1 ended with exit code 1 {place}; its message is above\n"
    )
    assert its_relay.exit_code(None) == 143
    Activity(1, tmp_path).note(START)
    assert its_relay.exit_code(Failure(1, -signal.SIGTERM, last_activity(tmp_path, 1))) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM before there was anything to save\n"


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
    assert launch.main(["--rdzv-endpoint", "node1:29500", *SEVERAL]) == 0  # one launcher on each machine
    refusing: list[Callable[[], object]] = [lambda: launch.start_workers(3, ["pretrain"]), world_from_environment]
    for words in (["--standalone"], ["--nnodes", "1:1", "--rdzv-backend", "c10d"], ["--num-gpus", "2"]):
        refusing.append(partial(launch.main, [*words, "x.py"]))
    for refuses in refusing:
        with pytest.raises(GptparError) as caught:
            refuses()
        assert f" started 8 processes ({size}) without RANK and WORLD_SIZE, so that each would train" in str(
            caught.value
        )
        assert f": export RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local} in each" in str(caught.value)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert world_from_environment() == (0, 0, 1)
