"""A save in a thread of its own, while training goes on and overwrites what is being saved."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptpar.system.snapshot import Snapshot, StateGuard

NUM_COPIERS = max(2, min(8, (os.cpu_count() or 1) // 2))
"""Threads that copy ahead of the training: one moves 5 to 10 GB/s, and memory takes several."""


class SaveUnderWay:
    """Writes a snapshot. Training waits only before it overwrites bytes that are neither written nor copied yet.

    Args:
        write: saves the snapshot; every process's has to use a process group that nobody else uses meanwhile.
        guard: is asked by everything that overwrites what the snapshot holds.
        behind: whether to return at once; else when all is written.

    Attributes:
        iteration: of the state.
        snapshot: as given.
        seconds: that writing took; 0 until it is over.
    """

    def __init__(
        self, iteration: int, snapshot: Snapshot, write: Callable[[], Path], guard: StateGuard, *, behind: bool
    ):
        self.iteration, self.snapshot, self.seconds = iteration, snapshot, 0.0
        self._write, self._guard = write, guard
        self._path: Path | None = None
        self._error: BaseException | None = None
        guard.snapshot = snapshot
        self._threads = [threading.Thread(target=self._run, name="gptpar-save", daemon=True)]
        self._threads += [
            threading.Thread(target=snapshot.copy_ahead, name="gptpar-save-copies", daemon=True)
            for _ in range(NUM_COPIERS if snapshot.room else 0)
        ]
        if behind:
            for thread in self._threads:
                thread.start()
        else:
            self._threads = []
            self._run()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._path = self._write()
        except BaseException as error:  # the training loop raises it in `finish`
            self._error = error
        finally:
            self.seconds = time.perf_counter() - started
            self.snapshot.close()  # whoever waits to overwrite something need not any more

    @property
    def over(self) -> bool:
        """Whether the save is over on this process."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def failed(self) -> bool:
        """Whether it is over on this process with an error, which :meth:`finish` raises on every one."""
        return self.over and self._error is not None

    def finish(self) -> Path:
        """Wait until all is on the disk; returns the checkpoint's path.

        Raises:
            CheckpointError: on every process, if any failed: see ``save_checkpoint``.
        """
        for thread in self._threads:
            thread.join()
        if self._guard.snapshot is self.snapshot:
            self._guard.snapshot = None
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
