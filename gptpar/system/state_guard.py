"""``StateGuard`` is asked before weights or optimizer state are overwritten, which a save under way may still need."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gptpar.system.snapshot import STILL_SECONDS, Snapshot


class StateGuard:
    """Guards weights and optimizer state: who overwrites them asks it first, so that a save under way loses no byte.

    Attributes:
        snapshot: the snapshot of the save under way; ``None``: there is none.
        exchanged: returns the blocks of memory whose owners call :meth:`exchange`.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.exchanged: Callable[[], Iterable[torch.Tensor]] = lambda: ()

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return when the tensors' memory may be overwritten by work that is launched from now on."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.before_write(tensors)

    def exchange(self, block: torch.Tensor) -> torch.Tensor | None:
        """See :meth:`Snapshot.exchange`."""
        snapshot = self.snapshot
        return None if snapshot is None else snapshot.exchange(block)

    def wait_until_held(self) -> None:
        """Return when a step may be requested: see :meth:`Snapshot.hold`."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.wait_until_held()

    def wait_until_read(self) -> None:
        """Return when no save reads state any more, or after the longest time that a disk may be still."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.closed.wait(STILL_SECONDS)

    def needs(self, block: torch.Tensor) -> bool:
        """See :meth:`Snapshot.needs`."""
        snapshot = self.snapshot
        return snapshot is not None and snapshot.needs(block)
