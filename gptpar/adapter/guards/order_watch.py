"""Detects that processes wait for each other forever because they have not made the same calls.

Processes match collectives by their order alone. If one process skips a block or saves alone, the others wait for a
collective that never comes, and torch does not say why. So each process notes the calls that all have to make: its
engine's methods and, where parameters are gathered, the units. When it has noted nothing for a while, a thread
publishes the notes of the step and compares them with those of the other processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from gptpar.adapter.guards.agreement import REMEDY
from gptpar.errors import GptparError
from gptpar.system import quiet_end
from gptpar.topology.groups import Topology

UNIT = "unit "
"""How the place of a unit's call begins."""

LOOK_SECONDS = 1.0
"""Time between two checks of the thread; a process that has noted nothing in between counts as waiting."""

LOOK_SECONDS_WITHOUT_UNITS = 5.0
"""The same where units are not noted: there is nothing to note during the passes of a step, and most take less."""

ALL_CALL = (
    "All processes have to take equally many steps of equally many micro-batches, and to call engine.save_checkpoint() "
    "and the engine's other methods together, not one process alone."
)

TELL_SECONDS = 60.0
"""A process that waits so long for others that may still come says so, once."""

LEFT_TO_RAISE_SECONDS = 20.0
"""The training loop has this long to raise the error itself; it cannot if it waits inside of CUDA."""

MAX_NOTES = 20_000
"""The most notes of a step; calls without steps, as in a long evaluation, must not fill memory."""

CHECK_SECONDS = 0.2
"""Time between two checks by a process that waits for a collective whether it can still come."""

MEET_SECONDS = 10.0
"""A process that reads a parameter waits so long for the others to do so."""

_WITHDRAWN = "-1000000"
"""The number of processes at a place where one has waited in vain."""

END_SECONDS = 1.0
"""How long the end of a process waits for the thread that reads the store. The other thread is not waited for: its
collective may never complete."""


class OrderWatch:
    """Notes the order of a process's calls, and compares it with that of other processes.

    Attributes:
        error: the difference that was found; ``None``: none.
        notes_units: whether processes have to call the same units in the same order.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._store: dist.Store | None = None
        self._prefix, self._met = "", ""
        self._step, self._notes = 1, list[str]()
        self._seen: tuple[int, int] = (-1, -1)
        self.notes_units = self._has_told = False
        self._last_change = time.monotonic()
        self._end = threading.Event()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._looking, self._others = (
            threading.Thread(target=target, name="gptpar order watch", daemon=True)
            for target in (self._run, self._wait_for_others)
        )
        self.error: GptparError | None = None

    def start(self, name: str, *, notes_units: bool) -> None:
        """Start the threads, if there are other processes.

        Args:
            name: of the engine: the same on all processes, and different from those of other engines.
            notes_units: see the attribute.
        """
        self.notes_units = notes_units
        if self._topology.mesh.world_size > 1:
            self._store, self._prefix = dist.distributed_c10d._get_default_store(), f"gptpar/order/{name}"
            self._looking.start()
            self._others.start()
            quiet_end.wait_at_exit()
            atexit.register(self._end_threads)  # one in the store at the end of the interpreter would abort the process

    def begin_step(self, step: int) -> None:
        """Begin another step: drop the notes of the last one."""
        self._step, self._notes = step, []

    def note(self, place: str) -> None:
        """Note where this process is now; all processes have to come there in the same order."""
        if self._store is not None and len(self._notes) < MAX_NOTES:
            self._notes.append(place)

    def meets(self, place: str) -> bool:
        """Wait until all processes have come to this place, once; False: some have not within ``MEET_SECONDS``.

        All processes get the same answer; after a False, the place stays closed. Where stages of a pipeline have
        different parameters, it is always False. A collective cannot ask, because others may be in another one.
        """
        if self._store is None or self._topology.mesh.pipeline > 1:
            return False
        key, count = f"{self._prefix}/met/{place}", self._topology.mesh.world_size
        here, end = self._store.add(key, 1), time.monotonic() + MEET_SECONDS
        while 0 < here < count:
            if time.monotonic() > end:
                self._store.compare_set(key, str(here), _WITHDRAWN)  # unless another one has come just now
            time.sleep(1e-3)
            here = self._store.add(key, 0)
        if here == count:
            if self._met and self._topology.rank == 0:
                self._store.delete_key(self._met)  # which all have left
            self._met = key
        return here == count

    @contextlib.contextmanager
    def together(self, method: str) -> Iterator[None]:
        """A method of the engine that all processes call; if another process ends for a difference, so does this one.

        Raises:
            GptparError: processes have made different calls.
        """
        self.note(f"engine.{method}()")
        try:
            yield
        except RuntimeError:
            if self._store is not None and self.error is None:
                with contextlib.suppress(RuntimeError):  # the store ends with the run
                    self._look()
            self.check()
            raise

    def wait_for(self, work: Any) -> None:
        """Wait for a collective, until it is complete or known to be impossible.

        Raises:
            GptparError: processes have made different calls.
        """
        if self._store is None or self._topology.device.type != "cpu":
            work.wait()
            return
        done = threading.Event()  # some of gloo's collectives progress only inside of wait(): another thread calls it
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

    @property
    def num_notes(self) -> int:
        """Number of calls noted in this step."""
        return len(self._notes)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the threads; one that waits for a collective that never comes ends with the process."""
        if self._store is not None:
            self.note("engine.close()")
            with contextlib.suppress(RuntimeError):
                self._publish()  # other processes may wait for this one
            atexit.unregister(self._end_threads)
        self._end_threads()

    def _end_threads(self) -> None:
        self._end.set()
        self._waiting.put(None)
        if self._looking.is_alive():
            self._looking.join(END_SECONDS)

    def _run(self) -> None:
        while not self._end.wait(LOOK_SECONDS if self.notes_units else LOOK_SECONDS_WITHOUT_UNITS):
            now = self._step, len(self._notes)
            waits, self._seen = now == self._seen, now
            if not waits:
                self._last_change = time.monotonic()
                continue
            with contextlib.suppress(RuntimeError):  # the store ends with the run
                self._look()
            if self.error is not None:
                self._leave()
                return

    def _publish(self) -> None:
        assert self._store is not None
        self._store.set(f"{self._prefix}/{self._topology.rank}", json.dumps([self._step, self._notes]))

    def _look(self) -> None:
        assert self._store is not None
        self._publish()
        keys = [f"{self._prefix}/{rank}" for rank in range(self._topology.mesh.world_size)]
        if not self._store.check(keys):
            return
        found = [tuple(json.loads(value)) for value in self._store.multi_get(keys)]
        if len({step for step, _ in found}) == 1:
            self.error = difference_of([notes for _, notes in found], self._step)
        if self.error is None and not self._has_told and time.monotonic() - self._last_change > TELL_SECONDS:
            self._tell(found)

    def _tell(self, found: Sequence[tuple[int, list[str]]]) -> None:
        """Say for whom this process waits, if others have not come to where it is."""
        step, notes = found[self._topology.rank]
        behind = [
            f"rank {rank} was last seen {f'at {seen[-1]}' if seen else 'before its first call'} of step {number}"
            for rank, (number, seen) in enumerate(found)
            if (number, len(seen)) < (step, len(notes))
        ]
        if notes and behind:
            self._has_told = True
            print(
                f"gptpar: rank {self._topology.rank} has waited {TELL_SECONDS:g} seconds at {notes[-1]} of step "
                f"{step}: {', '.join(behind)}. If these processes have no more batches, or wait for this one, the run "
                "hangs: every process has to take equally many steps.",
                file=sys.stderr,
                flush=True,
            )

    def _leave(self) -> None:
        """Print the error and end the process, if the training loop cannot raise it because it waits forever."""
        if not self._end.wait(LEFT_TO_RAISE_SECONDS):
            print(f"gptpar: {self.error}", file=sys.stderr, flush=True)
            os._exit(1)


def name_of_engine(topology: Topology) -> str:
    """A new, unique name of an engine, the same on all processes."""
    names = [uuid.uuid4().hex]
    if topology.mesh.world_size > 1:
        dist.broadcast_object_list(names)
    return names[0]


def difference_of(notes: Sequence[Sequence[str]], step: int) -> GptparError | None:
    """The error about processes that wait for each other; ``None`` if some are only behind the others.

    Args:
        notes: each rank's calls in the step, in order.
        step: number of the step.
    """
    for place in range(min(map(len, notes))):
        if len({each[place] for each in notes}) > 1:
            ranks = ", ".join(f"rank {rank} is at {each[place]}" for rank, each in enumerate(notes))
            of_units = any(each[place].startswith(UNIT) for each in notes)
            return GptparError(
                f"processes wait for each other in step {step}, because they have made different calls: after "
                f"{place} equal calls, {ranks}. The run cannot go on: end it. {REMEDY if of_units else ALL_CALL}"
            )
    return None
