"""An event log for the CPU optimizers that a test makes through others."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from gptpar.offload import machine
from gptpar.offload.events import EventLog, What
from gptpar.offload.host_optimizer import HostOptimizer


@contextmanager
def logged() -> Iterator[EventLog]:
    """Trainers and TwinFlowAdamWs that are made inside record in this log."""
    log = EventLog()
    with mock.patch.object(machine, "HostOptimizer", partial(HostOptimizer, log=log)):
        yield log


def starts_of(log: EventLog | None, what: What, unit: str | None = None) -> set[int]:
    """Where the buckets begin to which something has happened since their last step was done."""
    assert log is not None
    return {event.start for event in log.this_step(unit) if event.what == what}
