"""Updates of single buckets: the kernel works on one while Python sends off the one before and prepares the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gptpar.offload.buckets import Bucket, Buffers, Recipe
from gptpar.offload.events import EventLog, What
from gptpar.offload.transfers import Departure, Transfers
from gptpar.optim.cpu_adam import AdamStep, CpuAdam, Done

REMEMBERED = 1 << 14
"""Updates of which the times are kept: several steps of the largest models."""


@dataclass(frozen=True)
class _AtWork:
    bucket: Bucket
    departure: Departure
    wait: Callable[[], Done]
    landed: Callable[[], None]
    sends: bool


class Updates:
    """For one thread.

    Args:
        adam: the kernel.
        transfers: the way to the device.
        log: is told of each update.

    Attributes:
        busy_s: time in which the kernel worked.
        latest: unit, begin and end (:func:`time.monotonic`) of the latest updates.
    """

    def __init__(self, adam: CpuAdam, transfers: Transfers, log: EventLog | None = None):
        self.adam, self._transfers, self._log = adam, transfers, log
        self.busy_s = 0.0
        self.latest: deque[tuple[str, float, float]] = deque(maxlen=REMEMBERED)
        self._at_work: _AtWork | None = None

    @property
    def under_way(self) -> bool:
        """Whether :meth:`land` has something to wait for."""
        return self._at_work is not None

    def begin(
        self,
        bucket: Bucket,
        recipe: Recipe,
        into: Buffers | None,
        landed: Callable[[], None],
        only: np.ndarray | None = None,
        *,
        sends: bool = True,
    ) -> None:
        """Order an update, and see to the one before while the kernel works on this one.

        Args:
            into: where the new state goes; default: in place of the old one.
            landed: called when it is done and its parameters are on their way.
            only: ranges to which it keeps, in ``into`` and in the bucket's own way.
            sends: else the parameters wait in that way.
        """
        assert bucket.grad is not None
        grad, departure = bucket.grad.tensor(), self._way(bucket)
        self._record(What.ARRIVED, bucket)
        how = [AdamStep(*rates, bucket.steps + 1, recipe.divisor) for rates in recipe.rates]
        stretches = [(run.start, run.stop, how[run.group]) for run in bucket.runs]
        beside = None if into is None else into.all()
        wait = self.adam.order(*bucket.now.all(), grad, stretches, into=beside, low=departure.values, only=only)
        self.land()
        self._at_work = _AtWork(bucket, departure, wait, landed, sends)

    def land(self) -> None:
        """Wait for the update at work, if there is one, and send its result."""
        work, self._at_work = self._at_work, None
        if work is None:
            return
        done = work.wait()
        self.latest.append((work.bucket.unit, done.begin, done.end))
        self.busy_s += done.end - done.begin
        self._record(What.LANDED, work.bucket)
        if work.sends:
            work.bucket.settle_device = work.departure.send()
            self._record(What.SENT, work.bucket)
        work.landed()

    def send(self, bucket: Bucket) -> None:
        """Send the master weights as they are."""
        departure = self._way(bucket)
        departure.values.copy_(bucket.now.weights)
        bucket.settle_device = departure.send()
        self._record(What.SENT, bucket)

    def _record(self, what: What, bucket: Bucket) -> None:
        if self._log is not None:
            self._log.record(what, bucket.unit, bucket.start, bucket.stop)

    def _way(self, bucket: Bucket) -> Departure:
        assert bucket.live is not None
        return bucket.way or self._transfers.outgoing(bucket.live)
