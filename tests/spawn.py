"""Run a function as several gloo ranks on this machine and get each rank's result, or every rank's traceback.

from tests.spawn import spawn

def sums(rank: int, scale: int) -> float:
    total = torch.tensor(float(rank * scale))
    torch.distributed.all_reduce(total)
    return total.item()

def test_sums():
    assert spawn(sums, 2, 10) == [10.0, 10.0]
"""

from __future__ import annotations

import faulthandler
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


def spawn(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``nproc`` new processes with ``torch.distributed`` (gloo) initialised.

    Each rank has one thread and the same seed. ``fn`` must be defined at the top level of its module;
    arguments and results must pickle.

    Returns:
        the results, by rank.

    Raises:
        AssertionError: a rank failed, died or took longer than ``timeout_s``; holds every rank's traceback,
            for a rank that hung the place where it stood.
    """
    with tempfile.TemporaryDirectory(prefix="gptpar-ranks-") as folder:
        ranks = [_Rank(rank, nproc, folder, fn, args) for rank in range(nproc)]
        try:
            _collect(ranks, timeout_s)
            failed = [rank for rank in ranks if not rank.succeeded]
            if failed:
                raise AssertionError("\n".join(rank.report() for rank in failed))
            return [rank.outcome for rank in ranks]
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def seed_everything() -> None:
    """The same random numbers for every test, whichever ran before it, and for every rank."""
    random.seed(1234)
    np.random.seed(1234)
    # torch's own word notes the whole stack for each kind of device that may come.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(1234)


class _Rank:
    """One process, seen from the parent."""

    def __init__(self, rank: int, nproc: int, folder: str, fn: Callable, args: tuple):
        self.rank, self.folder = rank, Path(folder)
        self.succeeded, self.outcome = False, None
        self.pipe, theirs = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(target=_run_rank, args=(rank, nproc, folder, theirs, fn, args))
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            self.succeeded, self.outcome = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(GRACE_S)
            self.outcome = f"died without a word, exit code {self.process.exitcode}"

    def report(self) -> str:
        if self.outcome is None:
            self.outcome = f"did not finish; it stood at:\n{self._stack()}"
        return f"--- rank {self.rank}: {self.outcome}"

    def _stack(self) -> str:
        path = _stack_file(self.folder, self.rank)
        if not path.exists():
            return "(still importing)"
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while not path.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # until all lines are there
        return path.read_text()


def _collect(ranks: list[_Rank], timeout_s: float) -> None:
    """Receive until all ranks have answered, the time is up, or the grace after the first failure is."""
    deadline = time.monotonic() + timeout_s
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            rank = waiting.pop(pipe)
            rank.receive()
            if not rank.succeeded:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _run_rank(rank: int, nproc: int, folder: str, pipe: Connection, fn: Callable, args: tuple) -> None:
    """The child: initialise, call, send back (True, result) or (False, traceback)."""
    with open(_stack_file(Path(folder), rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        seed_everything()
        try:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", store, timedelta(minutes=5), rank=rank, world_size=nproc)
            answer = pickle.dumps((True, fn(rank, *args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
        if dist.is_initialized():
            dist.destroy_process_group()


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"
