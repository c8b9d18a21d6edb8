"""Finds out why processes wait for each other: they have called other units.

Processes match collectives by their order alone. If one calls a block less, the others wait for a collective that never
comes, and nothing of torch's says why. So each process notes what it calls, and a thread looks when nothing has moved
for a while: it publishes the notes of the step and compares them with those of the other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gptpar.any_module.agreement import REMEDY
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology

LOOK_SECONDS = 1.0
"""Between two looks of the thread; a process that has noted nothing in between is taken to wait."""

LEFT_TO_RAISE_SECONDS = 20.0
"""How long the training loop has to raise the error itself; it cannot where it waits inside of CUDA."""

MAX_NOTES = 20_000
"""Of a step; what is called without ever taking one (a long evaluation) is not kept."""

CHECK_SECONDS = 0.2
"""How often a process that waits for a collective looks whether it cannot come."""


class OrderWatch:
    """Notes the order of a process's calls.

    Attributes:
        error: what was found.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._store: dist.Store | None = None
        self._prefix = ""
        self._step, self._notes = 1, list[str]()
        self._seen: tuple[int, int] = (-1, -1)
        self._end = threading.Event()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.error: GptparError | None = None

    def start(self, name: str) -> None:
        """Begin to look, if there are other processes.

        Args:
            name: of the engine, the same on all processes, and another one than that of other engines.
        """
        if self._topology.layout.world_size > 1:
            self._store, self._prefix = dist.distributed_c10d._get_default_store(), f"gptpar/order/{name}"
            for target in (self._run, self._wait_for_others):
                threading.Thread(target=target, name="gptpar order watch", daemon=True).start()

    def begin_step(self, step: int) -> None:
        """Another step: forget the notes of the last one."""
        self._step, self._notes = step, []

    def note(self, what: str) -> None:
        """This process is about to do something that all processes do in the same order."""
        if self._store is not None and len(self._notes) < MAX_NOTES:
            self._notes.append(what)

    def wait_for(self, work: Any) -> None:
        """Wait for a collective, but not longer than until it is known that it cannot come.

        Raises:
            GptparError: processes have called other units.
        """
        if self._store is None or self._topology.device.type != "cpu":
            work.wait()
            return
        done = threading.Event()  # some of gloo's collectives progress in wait() alone, so another thread is in there
        problem: list[BaseException] = []
        self._waiting.put((work, done, problem))
        while not done.wait(CHECK_SECONDS):
            self.check()
        if problem:
            raise problem[0]

    def _wait_for_others(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            work, done, problem = waiting
            try:
                work.wait()
            except BaseException as error:
                problem.append(error)
            done.set()

    def check(self) -> None:
        """Raise what was found."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the threads; one that is in a collective which never comes ends with the process."""
        self._end.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            now = self._step, len(self._notes)
            waits, self._seen = now == self._seen, now
            if not waits or not self._notes:
                continue
            with contextlib.suppress(RuntimeError):  # the store ends with the run
                self._look()
            if self.error is not None:
                self._leave()
                return

    def _look(self) -> None:
        assert self._store is not None
        self._store.set(f"{self._prefix}/{self._topology.rank}", json.dumps([self._step, self._notes]))
        ranks = range(self._topology.layout.world_size)
        keys = [f"{self._prefix}/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return
        found = [json.loads(self._store.get(key)) for key in keys]
        if len({step for step, _ in found}) == 1:
            self.error = difference_of([notes for _, notes in found], self._step)

    def _leave(self) -> None:
        """Where the training loop cannot raise the error, say it and end the process: it would wait forever."""
        if not self._end.wait(LEFT_TO_RAISE_SECONDS):
            print(f"gptpar: {self.error}", file=sys.stderr, flush=True)
            os._exit(1)


def name_of_engine(topology: Topology) -> str:
    """A name that no engine before it has had, agreed by all processes."""
    names = [uuid.uuid4().hex]
    if topology.layout.world_size > 1:
        dist.broadcast_object_list(names)
    return names[0]


def difference_of(notes: Sequence[Sequence[str]], step: int) -> GptparError | None:
    """What is told of processes that wait; ``None``: some are behind the others, and may come.

    Args:
        notes: of each rank's step, in order.
    """
    for place in range(min(map(len, notes))):
        if len({each[place] for each in notes}) > 1:
            told = ", ".join(f"rank {rank} {each[place]}" for rank, each in enumerate(notes))
            return GptparError(
                f"processes wait for each other in step {step}, because they have called other units: after "
                f"{place} calls that are alike, {told}. Nothing can go on from here: end the run. {REMEDY}"
            )
    return None
