"""Logs what happens to the CPU optimizer's buckets, in order: for tests and for debugging.

Nothing is recorded unless a log is given to :class:`~gptpar.offload.host_optimizer.HostOptimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class What(StrEnum):
    """What happened to a bucket; :mod:`~gptpar.offload.bucket_state` says which of these change its state."""

    SUBMITTED_PARTIAL = "partial gradient submitted"
    SUBMITTED = "gradient submitted"
    PARTIAL_DROPPED = "partial gradient dropped"
    SPECULATION_BEGUN = "speculation begun"
    COMPLETION_BEGUN = "completion of the speculated state begun"
    UPDATE_BEGUN = "update in place begun"
    AVERAGE_BEGUN = "update of the momentum begun"
    AVERAGED = "momentum updated"
    DIRECTED = "direction submitted"
    COMMITTED = "speculated state committed"
    UPDATED = "updated in place"
    SKIPPED = "skipped"
    TAKEN_BACK = "speculation taken back"

    PREPARED = "prepared for partial gradients"
    ARRIVED = "gradient in host memory"
    KERNEL_DONE = "kernel done"
    SENT = "parameters being copied to the device"

    WAITED = "waited"
    """The training loop waited for a unit."""
    STEP_REQUESTED = "step requested"
    """The training loop requested the step of all buckets."""
    STEP_TAKEN = "step taken"
    """The thread has done the step of all buckets."""


STEP_DONE = frozenset({What.COMMITTED, What.UPDATED, What.SKIPPED})
"""A bucket's last event of a step."""


@dataclass(frozen=True)
class LogEntry:
    """One event.

    Attributes:
        unit: the bucket's unit; empty if the event concerns the whole step.
        start, stop: position of the bucket's elements in the unit's offloaded range.
    """

    what: What
    unit: str = ""
    start: int = 0
    stop: int = 0


class EventLog:
    """Log entries of all threads, oldest first."""

    def __init__(self) -> None:
        self.events: list[LogEntry] = []

    def record(self, what: What, unit: str = "", start: int = 0, stop: int = 0) -> None:
        """Add an event. A subclass may delay the thread that calls this."""
        self.events.append(LogEntry(what, unit, start, stop))

    def of(self, *what: What, unit: str | None = None) -> list[LogEntry]:
        """The events of some kinds, of all units or of one."""
        return [event for event in list(self.events) if event.what in what and unit in (None, event.unit)]
