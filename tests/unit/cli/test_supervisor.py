"""Workers of one machine that die: who is named, who is started again, and where it ends."""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from gptpar.cli.launch import LaunchJob, Program, run_job, supervisor
from gptpar.cli.launch.job import job_of, read_flags
from gptpar.cli.launch.rendezvous import LocalStore
from gptpar.errors import GptparError
from gptpar.system.processes import is_running

START = (
    "import os, signal, time; start = int(os.environ['TORCHELASTIC_RESTART_COUNT']); rank = int(os.environ['RANK']);"
)


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LocalStore", mock.Mock(**{"return_value.environment.return_value": {}}))
    monkeypatch.setattr(supervisor, "END_SECONDS", 1.0)


def job(program: str, count: int = 2, **options: object) -> LaunchJob:
    """Workers that run a line of Python, started without a template."""
    return LaunchJob(Program("executable", sys.executable, ("-c", START + program)), count, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_others_end_at_once_and_all_are_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The healthy one ignores SIGTERM, as one does that waits in a collective, and has started a helper of its own."""
    program = (
        f"open(f'{tmp_path}/{{start}}-{{rank}}', 'w').write(str(os.getpid()));"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pid = start == 0 and rank == 0 and os.fork();"
        f"pid and open('{tmp_path}/helper', 'w').write(str(pid));"
        "start == 0 and rank == 1 and (time.sleep(1), os.kill(os.getpid(), 9));"
        "start == 0 and time.sleep(600)"
    )
    begin = time.monotonic()
    assert run_job(job(program, max_restarts=1)) == 0
    assert time.monotonic() - begin < 120
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "0-1", "1-0", "1-1", "helper"}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("restart 1 of 1: rank 1 was killed by SIGKILL")
    for name in ("0-0", "0-1", "helper"):
        assert not is_running(int((tmp_path / name).read_text()))


@pytest.mark.slow
def test_what_dead_workers_called_final_is_not_said_of_later_ones() -> None:
    program = (
        "from gptpar.system.restart import note_final;"
        "start == 0 and rank == 1 and (note_final(), time.sleep(60));"
        "start == 0 and (time.sleep(2), os.kill(os.getpid(), 9));"
        "start == 1 and rank == 1 and os._exit(3)"
    )
    assert run_job(job(program, max_restarts=2)) == 0


def test_restarts_are_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job(job("os.kill(os.getpid(), signal.SIGSEGV)", 1, max_restarts=2)) == 1
    told = capsys.readouterr().err.splitlines()
    place = "rank 0 was killed by SIGSEGV while it was at start-up"
    assert told == [
        f"restart 1 of 2: {place}",
        f"restart 2 of 2: {place}",
        f"error: {place}; all 2 restarts (--max-restarts) are used up",
    ]


def test_fewer_go_on_where_no_more_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = f"open('{tmp_path}/' + os.environ['WORLD_SIZE'], 'a'); start == 0 and os.kill(os.getpid(), 9)"
    assert run_job(job(program, 4, max_restarts=1, processes_left=lambda count: 2)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"4", "2"}
    assert "  2 of 4 processes go on: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--standalone --nproc-per-node 3 -m gptpar pretrain --lr 1", ("module", 3, 0, 0.0, "127.0.0.1", 0)),
        ("--nproc-per-node 2 --max-restarts 4 --hang-seconds 9 x.py a", ("script", 2, 4, 9.0, "127.0.0.1", 0)),
        (
            "--master-addr 10.0.0.1 --master-port 7 --no-python --max-restarts 1 run.sh",
            ("executable", 1, 1, 600.0, "10.0.0.1", 7),
        ),
    ],
)
def test_torchruns_flags_describe_a_job(words: str, wanted: tuple[str | int | float, ...]) -> None:
    job = job_of(read_flags(words.split()))
    assert job is not None
    assert (job.program.kind, job.count, job.max_restarts, job.hang_seconds, job.address, job.port) == wanted


def test_the_store_is_on_this_machine_alone_and_a_taken_port_is_named() -> None:
    store = LocalStore()
    environment = store.environment()
    assert environment["MASTER_ADDR"] == "127.0.0.1" and int(environment["MASTER_PORT"]) == store.port > 0
    assert environment["GLOO_SOCKET_IFNAME"] == os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listens = [row[1].split(":") for row in rows if row[3] == "0A"]
    assert [address for address, port in listens if int(port, 16) == store.port] == ["0100007F"]
    with pytest.raises(GptparError, match=f"cannot meet at 127.0.0.1:{store.port} .*: choose another --master-port"):
        LocalStore(port=store.port)
