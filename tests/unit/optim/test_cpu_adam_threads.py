"""AdamW on the CPU beside what else a process does: threads, orders, forks."""

import itertools
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

from gptpar.optim import cpu_adam
from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.cpu_adam import CpuAdam
from tests.e2e.commands import said_in_fork
from tests.unit.optim.cpu_adam_runs import HOW, make, run, same


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 1), (3, 1), (8, 6), (14, 12), (16, 13), (52, 42)])
def test_some_cores_are_left_to_others(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert cpu_adam.default_threads() == CpuAdam().threads == threads


def fork_between_steps(length: int) -> None:
    def step() -> torch.Tensor:
        p, m, v = torch.ones(length), torch.zeros(length), torch.zeros(length)
        how = [(0, length, AdamStep(0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, 1))]
        CpuAdam(3).order((p, m, v), torch.arange(float(length)), how)()
        return p

    before = step()
    child = os.fork()
    signal.alarm(60 * (child == 0))  # the child of a broken pool waits for ever
    after = step()
    if child == 0:
        os._exit(0 if bool((before == after).all()) else 3)
    print(os.waitpid(child, 0)[1], bool((before == after).all()))


@pytest.mark.slow
def test_a_forked_child_has_threads_of_its_own(library):
    assert said_in_fork(fork_between_steps, 300_000) == "0 True\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orders_are_done_one_after_the_other(dtype):
    """Each step begins with what the one before has left; they are waited for in order and, natively, out of order."""
    tensors = make(300001, dtype, dtype)
    expected, stretches = [t.clone() for t in tensors], [[(0, 300001, replace(HOW, step=n + 1))] for n in range(5)]
    for how in stretches:
        CpuAdam(2).steps(expected[:3], expected[3], how)
    before = time.monotonic()
    orders = [CpuAdam(2).order(tensors[:3], tensors[3], how) for how in stretches]
    done = [wait() for wait in (orders if dtype == torch.float64 else reversed(orders))]
    assert all(finite and before <= begin < end <= time.monotonic() for finite, begin, end in done)
    in_order = done if dtype == torch.float64 else done[::-1]
    assert all(one.end <= other.begin for one, other in itertools.pairwise(in_order))
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


@pytest.mark.slow
def test_calls_and_wakes_of_several_threads_do_not_mix(library):
    """Threads of the pool asleep, looking for work, and at work on another thread's step."""
    expected, stop = run(CpuAdam(1), make(300007))[1], threading.Event()
    results: list[bool] = []

    def work():
        for pause in (0.0, 0.0003, 0.005, 0.0, 0.0):
            time.sleep(pause)
            results.append(same(run(CpuAdam(3), make(300007))[1], expected))

    def wake():
        while not stop.wait(0.0005):
            CpuAdam(3).wake()

    waking, others = threading.Thread(target=wake), [threading.Thread(target=work) for _ in range(4)]
    for one in (waking, *others):
        one.start()
    for one in others:
        one.join()
    stop.set()
    waking.join()
    assert results == [True] * 20
