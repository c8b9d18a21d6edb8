"""What happens to the optimizer state that the CPU updates, in order: for tests, and for who looks for a fault.

Nothing is recorded unless a log is given to :class:`~gptpar.offload.host_optimizer.HostOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class What(StrEnum):
    """What happened: to one bucket, to one unit (waited), or to the whole step (the last two)."""

    PREPARED = "prepared for partial gradients"
    SUBMITTED_PARTIAL = "partial gradient submitted"
    SUBMITTED = "gradient submitted"
    DROPPED_PARTIAL = "partial gradient dropped"
    ARRIVED = "gradient in host memory"
    SPECULATED = "update begun in the double buffer"
    COMPLETED = "update of the open ranges begun in the double buffer"
    UPDATED = "update begun in place"
    LANDED = "kernel done"
    SENT = "new parameters on their way to the device"
    COMMITTED = "step done: the double buffer is the state"
    SETTLED = "step done: updated in place"
    SKIPPED = "step done: nothing changed"
    WAITED = "the training loop waited"
    STEP_REQUESTED = "step requested"
    STEP_TAKEN = "step taken"


STEP_DONE = frozenset({What.COMMITTED, What.SETTLED, What.SKIPPED})
"""A bucket's last event of a step."""


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        unit: whose bucket; empty for the whole step.
        start, stop: the bucket's elements within its unit's offloaded range.
    """

    what: What
    unit: str = ""
    start: int = 0
    stop: int = 0


class EventLog:
    """Events in the order in which they were recorded, by any thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, what: What, unit: str = "", start: int = 0, stop: int = 0) -> None:
        """Add an event; whoever overrides this may delay the thread that calls it."""
        self.events.append(Event(what, unit, start, stop))

    def of(self, *what: What, unit: str | None = None) -> list[Event]:
        """The events of some kinds, of all units or of one."""
        return [event for event in list(self.events) if event.what in what and unit in (None, event.unit)]

    def this_step(self, unit: str | None = None) -> Iterator[Event]:
        """What happened to each bucket, of all units or of one, since its last step was done."""
        events = list(self.events)
        done = {(e.unit, e.start): place for place, e in enumerate(events) if e.what in STEP_DONE}
        for place, event in enumerate(events):
            if unit in (None, event.unit) and place > done.get((event.unit, event.start), -1):
                yield event
