"""Finds out whether a pass that ended in an error ended so on all processes, before the next one begins.

A training loop may catch an error, and call the module again. That is right if all processes do the same. If one of
them does it alone, the others wait in the failed pass for collectives, and would get those of another pass instead.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology

WAIT_SECONDS = 30.0
"""A process that meets the same error does so before long; one that does not waits in its pass."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.2
"""Seconds between two looks whether all other processes have met an error, too."""


class FailedPasses:
    """Notes passes that ended in an error, and compares them with those of other processes.

    Args:
        topology: the processes.
        name: of the engine: the same on all processes, and different from those of other engines.
        watch: knows earlier that processes have made different calls.
    """

    def __init__(self, topology: Topology, name: str, watch: OrderWatch):
        self._topology, self._watch = topology, watch
        self._prefix = f"gptpar/failed/{name}"
        self._count, self._place = 0, ""
        self._error: GptparError | None = None

    def note(self, place: str) -> None:
        """A pass ended in an error after some of its collectives; ``place`` says which pass that was."""
        if self._topology.mesh.world_size > 1 and not self._place:
            calls = self._watch.num_notes
            self._count, self._place = self._count + 1, f"{place}, after {calls} calls" if calls else place
            self._watch.note(f"the error that ended {place}")

    def settle(self) -> None:
        """Return when all processes are known to have met an error in the same pass, if this one has.

        Raises:
            GptparError: others have not, so that this process cannot go on.
        """
        if self._error is not None:
            raise self._error
        if not self._place:
            return
        try:
            self._compare(self._wait_for_others())
        except GptparError as error:
            self._error = error
            raise
        self._place = ""

    def _wait_for_others(self) -> list[str | None]:
        """The pass that failed on each process; ``None``: none has, as far as this process can know."""
        rank, ranks = self._topology.rank, range(self._topology.mesh.world_size)
        keys = [f"{self._prefix}/{self._count}/{rank}" for rank in ranks]
        places: list[str | None] = [None for _ in ranks]
        until, pause = time.monotonic() + WAIT_SECONDS, FIRST_PAUSE
        with contextlib.suppress(dist.DistError):  # the process that has the store has ended
            store = dist.distributed_c10d._get_default_store()
            store.set(keys[rank], self._place)
            while not store.check(keys) and time.monotonic() < until:
                self._watch.check()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            places = [store.get(key).decode() if store.check([key]) else None for key in keys]
        places[rank] = self._place
        return places

    def _compare(self, places: list[str | None]) -> None:
        if len(set(places)) == 1:
            return
        met = ", ".join(f"rank {rank} {_met(place)}" for rank, place in enumerate(places))
        raise GptparError(
            f"an error ended a pass, but not the same pass on all processes: {met}. The others wait in theirs, so "
            "that the run cannot go on: let the error end the process, and start again from a checkpoint."
        )


def _met(place: str | None) -> str:
    return f"met an error in {place}" if place else f"told of none within {WAIT_SECONDS:g} seconds"
