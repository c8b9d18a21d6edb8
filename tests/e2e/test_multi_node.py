"""Two hosts, played by two network namespaces of one machine, train as one host with two processes does."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, Started, command, gptpar, losses, words

PORT = 29571
TRAINING = "--train-iters 4 --global-batch-size 8 --distributed-backend gloo --save"


def ip(words: str, *, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces joined by a cable; the first has the address 10.213.0.1, the second 10.213.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    names = [f"gptpar{os.getpid()}h{i}" for i in range(2)]
    cables = [f"gp{os.getpid()}c{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip(f"netns add {name}")
            ip(f"link add {cables[0]} netns {names[0]} type veth peer name {cables[1]} netns {names[1]}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine refuses network namespaces: {error.stderr.strip()}")
        for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
            # GLOO_SOCKET_IFNAME is the same on both hosts, so their ends of the cable are named alike.
            ip(f"-n {name} link set {cable} name eth0")
            ip(f"-n {name} addr add 10.213.0.{i + 1}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}", check=False)


def start_on(host: str, rank: int, flags: str) -> subprocess.Popen[str]:
    """torchrun of one host, with one worker."""
    torchrun = f"--nnodes 2 --nproc-per-node 1 --node-rank {rank} --master-addr 10.213.0.1 --master-port {PORT}"
    pretrain = command(flags)[1:]  # without the interpreter: -m gptpar pretrain ...
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *torchrun.split(), *pretrain],
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What the processes printed, once all have ended; none outlives this call."""
    try:
        deadline = time.monotonic() + seconds
        return [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=40)


def test_two_hosts_train_as_one_host_does(tmp_path: Path, hosts: list[str]) -> None:
    processes = [start_on(host, rank, f"{TRAINING} {tmp_path}/two") for rank, host in enumerate(hosts)]
    outputs = finish(processes, 180)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    gptpar(f"{TRAINING} {tmp_path}/one --nproc-per-node 2")
    assert len(losses(tmp_path / "two")) == 4
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_other_flags_on_one_machine_are_refused_before_the_first_step() -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + 1)}
    others = ("", "--lr 1e-4 --train-iters 40 --hidden-size 64 --seed 3 --tensor-model-parallel-size 2")
    processes = [
        Started(words(flags), {**ENVIRONMENT, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, flags in enumerate(others)
    ]
    said = [process.stdout.read() for process in processes]
    assert [process.wait(60) for process in processes] == [1, 1], "\n".join(said)
    for flag, there, here in (("--lr", "0.01", "0.0001"), ("--train-iters", "20", "40"), ("--seed", "1234", "3")):
        assert re.search(rf"{flag} is {there} on \S+ \(rank 0\) and {here} on \S+ \(rank 1\): give ", said[1]), said[1]
    assert "iteration " not in said[0]
