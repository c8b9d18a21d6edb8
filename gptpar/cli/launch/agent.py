"""torchrun's agent, which also says which restart follows, which worker failed, and what it waits for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.relay import print_message
from gptpar.system.activity import forget_records, last_activity
from gptpar.system.processes import is_stopped
from gptpar.system.restart import Restart, forget_final, is_final

QUIET_SECONDS = 15.0
"""The launcher's wait for another machine, before it reports that it waits."""


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is waited for inside the block, if that takes long, and how long it took."""
    began, said = time.monotonic(), threading.Event()

    def say() -> None:
        said.set()
        print_message(f"waiting for {what}")

    timer = threading.Timer(QUIET_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            print_message(f"waited {time.monotonic() - began:.0f} s")


class ReportingRendezvous:
    """A rendezvous handler of torch that says what it waits for.

    Args:
        handler: torch's.
        machines, answer: what is waited for, in words: at a rendezvous, and from the machine that hosts it.
    """

    def __init__(self, handler: Any, machines: str, answer: str):
        self._handler, self._machines, self._answer = handler, machines, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """Wait for the other machines."""
        with waiting(self._machines):
            return self._handler.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Number of machines that want to join; the machine that hosts the rendezvous answers."""
        with waiting(self._answer):
            return int(self._handler.num_nodes_waiting())


class Agent(LocalElasticAgent):
    """Starts, watches and restarts the workers of this machine.

    Args:
        spec: torchrun's.
        folder: of the workers' records of activity.
        failed: called with the first failure of each start of the workers.
        rendezvous: torch's handler -> one that reports what it waits for.
        options: of torchrun's agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        folder: Path,
        failed: Callable[[Failure], None],
        rendezvous: Callable[[Any], Any],
        **options: Any,
    ):
        spec.rdzv_handler = rendezvous(spec.rdzv_handler)
        super().__init__(spec=spec, **options)
        self._folder, self._failed, self._limit = folder, failed, spec.max_restarts
        self._restart: Restart | None = None
        self._noticed = 0.0
        self._failure: Failure | None = None
        self._stopped = ""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        stopped = [worker.global_rank for worker in worker_group.workers if is_stopped(worker.id)]
        self._stopped = f"; rank {stopped[0]} is stopped (SIGSTOP)" if stopped else ""
        self._noticed = time.monotonic()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            before = self._failure
            found = [self._described(rank, failure.exitcode) for rank, failure in result.failures.items()]
            failure = min(found, key=lambda one: (one.is_exit, one.final, one.rank))
            if self._remaining_restarts and (failure.final or failure.is_repeated(before)):
                self._remaining_restarts = 0
                again = "" if failure.final else "; it ended there before, so a restart would end there again"
                failure = replace(failure, remark=failure.remark + again)
            self._failure = failure
            self._failed(failure)
        return result

    def _described(self, rank: int, code: int) -> Failure:
        doing, final = last_activity(self._folder, rank), is_final(self._folder, rank)
        return Failure(rank, code, doing, final=final, remark=self._stopped)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        used = self._limit - self._remaining_restarts
        if worker_group.state.name == "HEALTHY":  # of this machine; it does not count
            print_message(f"restart: another machine has joined, or starts its workers again{self._stopped}")
        else:
            print_message(f"restart {used} of {self._limit}: {self._failure}")
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        forget_records(self._folder)  # ranks may be other machines' now
        forget_final(self._folder)
        if self._restart is None:
            self._restart = Restart()
        else:
            ended = time.monotonic() - self._noticed
            self._restart = replace(self._restart, number=self._restart.number + 1, ended_s=ended)
        os.environ.update(self._restart.to_environment())
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started
