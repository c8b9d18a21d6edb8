"""Holds the updates that the CPU optimizer's thread has given to the kernel, and waits for several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gptpar.offload.buckets import Bucket, Buffers
from gptpar.offload.events import What
from gptpar.offload.transfers import MAX_UNSENT, D2HCopy, H2DCopy
from gptpar.optim.elementwise import Done

MAX_QUEUED = MAX_UNSENT - 1
"""Updates that the thread gives to the kernel before it waits for their ends, while gradients still come. With one at a
time, it took Python's lock from the backward pass after each bucket, and each layer took more than twice as long."""


class QueuedUpdate(NamedTuple):
    """An update that the kernel works on, or will.

    Attributes:
        copy: copies the new parameters to the device.
        wait: returns when the kernel is done.
        read: the gradient that the kernel reads; released after the update if ``ends_with`` is ``None``.
        into: the memory of the new state; ``None``: that of the old one.
        ends_with: the event with which the update ends the bucket's step; ``None``: it does not end the step.
        sends: whether the new parameters are sent when the kernel is done.
    """

    bucket: Bucket
    copy: H2DCopy
    wait: Callable[[], Done]
    read: D2HCopy
    into: Buffers | None
    ends_with: What | None
    sends: bool


class KernelQueue:
    """The updates, in the order in which the kernel works on them."""

    def __init__(self) -> None:
        self._updates: deque[QueuedUpdate] = deque()

    def __len__(self) -> int:
        return len(self._updates)

    def add(self, update: QueuedUpdate) -> None:
        """Note an update that the kernel has been given."""
        self._updates.append(update)

    def take_done(self, but: int = 0) -> Iterator[tuple[QueuedUpdate, Done]]:
        """Wait for all updates but the latest ``but``; yields them, oldest first, with their times."""
        updates = [self._updates.popleft() for _ in range(len(self._updates) - but)]
        ends = [update.wait() for update in reversed(updates)]  # once the latest is done, nothing waits for the others
        yield from zip(updates, reversed(ends), strict=True)
