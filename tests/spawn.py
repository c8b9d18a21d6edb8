"""Functions that run on several gloo ranks of this machine, with each rank's result, or every rank's traceback.

def sums(rank: int, scale: int) -> float:
    total = torch.tensor(float(rank * scale))
    torch.distributed.all_reduce(total)
    return total.item()

assert spawn(sums, 2, 10) == [10.0, 10.0]     # in two new processes
with RankPool(2) as ranks:                    # processes that stay: Python and torch are imported once
    assert ranks.run(sums, 10) == [10.0, 10.0]
"""

import faulthandler
import gc
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.forked import FORKED

GRACE_S = 5.0  # after one rank failed the others often fail too, and their tracebacks help
START_S = 60.0


def spawn(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``nproc`` new processes, which end after their answers; see :meth:`RankPool.run`."""
    with RankPool(nproc, stays=False) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


def seed_everything() -> None:
    """The same random numbers for every test, whichever ran before it, and for every rank."""
    random.seed(1234)
    np.random.seed(1234)
    # torch's own word notes the whole stack for each kind of device that may come.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(1234)


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish.

    Attributes:
        reports: by rank: the traceback of its error, or the place where it hangs, or '' where it is fine.
    """

    def __init__(self, reports: list[str]):
        super().__init__("\n".join(f"--- rank {rank}: {text}" for rank, text in enumerate(reports) if text))
        self.reports = reports


class RankPool:
    """``size`` gloo processes of a thread each. After a failure they are killed, and started anew for the next call.

    Args:
        stays: whether they take further calls; else each ends after its first.
    """

    def __init__(self, size: int, *, stays: bool = True):
        self.size, self._stays = size, stays
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank, each with the same seed.

        ``fn`` must be defined at the top level of its module; arguments and results must pickle.

        Returns:
            the results, by rank.

        Raises:
            RanksFailed: some rank raised, died or took longer than ``timeout_s``.
        """
        timeout_s += 0 if self._ranks else START_S
        if not self._ranks:
            self._start()
        task = pickle.dumps((fn, args))
        for _, pipe in self._ranks:
            pipe.send_bytes(task)
        answers = self._collect(timeout_s)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        reports = [self._report(rank, answer) for rank, answer in enumerate(answers)]
        self.close()
        raise RanksFailed(reports)

    def close(self) -> None:
        """Kill the processes."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gptpar-ranks-")
        for rank in range(self.size):
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(target=_serve, args=(rank, self.size, self._folder.name, theirs, self._stays))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, timeout_s: float) -> list[tuple[bool, Any] | None]:
        """Each rank's answer; None of one that gave none in time, or soon after the first failure."""
        deadline = time.monotonic() + timeout_s
        answers: list[tuple[bool, Any] | None] = [None] * self.size
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "died without a word")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _report(self, rank: int, answer: tuple[bool, Any] | None) -> str:
        if answer is not None:
            return "" if answer[0] else str(answer[1])
        assert self._folder is not None
        path = _stack_file(self._folder.name, rank)
        if not path.exists():
            return "did not finish its imports"
        os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while not path.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # until all lines are there
        return f"did not finish; it stands at:\n{path.read_text()}"


def _serve(rank: int, size: int, folder: str, pipe: Connection, stays: bool) -> None:
    """The child: take calls until it is killed, or one."""
    torch.set_num_threads(1)
    with open(_stack_file(folder, rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=5), rank=rank, world_size=size)
        is_first = True
        while stays or is_first:
            fn, args = pickle.loads(pipe.recv_bytes())
            seed_everything()
            try:
                answer = pickle.dumps((True, fn(rank, *args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)
            _destroy_groups()
            is_first = False
    if dist.is_initialized():
        dist.destroy_process_group()


def _destroy_groups() -> None:
    """Destroy the groups of a call: each has a thread that wakes a hundred times a second."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}.txt")
