"""An event log for the CPU optimizers that a test makes through others."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from gptpar.offload import machine
from gptpar.offload.events import STEP_DONE, EventLog, LogEntry, What
from gptpar.offload.host_optimizer import HostOptimizer


@contextmanager
def logged() -> Iterator[EventLog]:
    """Trainers and TwinFlowAdamWs that are made inside record in this log."""
    log = EventLog()
    with mock.patch.object(machine, "HostOptimizer", partial(HostOptimizer, log=log)):
        yield log


def this_step(log: EventLog, unit: str | None = None) -> Iterator[LogEntry]:
    """The events of each bucket since its last step was done, of all units or of one."""
    events = list(log.events)
    done = {(e.unit, e.start): place for place, e in enumerate(events) if e.what in STEP_DONE}
    for place, event in enumerate(events):
        if unit in (None, event.unit) and place > done.get((event.unit, event.start), -1):
            yield event


def starts_of(log: EventLog | None, what: What, unit: str | None = None) -> set[int]:
    """Where the buckets begin to which something has happened since their last step was done."""
    assert log is not None
    return {event.start for event in this_step(log, unit) if event.what == what}
