"""A save in a thread of its own, while training goes on and overwrites what is being saved."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptpar.errors import CheckpointError
from gptpar.system.snapshot import Snapshot, StateGuard

NUM_COPIERS = max(2, min(8, (os.cpu_count() or 1) // 2))
"""Threads that copy ahead of the training: one moves 5 to 10 GB/s, and memory takes several."""

Write = Callable[[Callable[[], None]], Path]
"""Saves a snapshot; calls what it is given after each piece."""


class SaveUnderWay:
    """Writes a snapshot. Training waits only before it overwrites bytes that are neither written nor copied yet.

    Args:
        write: every process's has to use a process group that nobody else uses meanwhile.
        guard: is asked by everything that overwrites what the snapshot holds.

    Attributes:
        iteration: of the state.
        snapshot: as given.
        seconds: that writing took; 0 until it is over.
        moved: pieces that this process has written or read back: as long as it grows, the disk answers.
        error: what ended it instead of the last byte; ``None`` so far.
    """

    def __init__(self, iteration: int, snapshot: Snapshot, write: Write, guard: StateGuard):
        self.iteration, self.snapshot, self.seconds, self.moved = iteration, snapshot, 0.0, 0
        self._write, self._guard = write, guard
        self._path: Path | None = None
        self.error: BaseException | None = None
        self._is_cancelled = False
        guard.snapshot = snapshot
        self._threads = [threading.Thread(target=self._run, name="gptpar-save", daemon=True)]
        self._threads += [
            threading.Thread(target=snapshot.copy_ahead, name="gptpar-save-copies", daemon=True)
            for _ in range(NUM_COPIERS if snapshot.room else 0)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._path = self._write(self._note_piece)
        except BaseException as error:  # whoever takes note of the end raises it, or forgives it
            self.error = error
        finally:
            self.seconds = time.perf_counter() - started
            self.snapshot.close()  # whoever waits to overwrite something need not any more

    def _note_piece(self) -> None:
        self.moved += 1  # a count that two threads lose has grown all the same
        if self._is_cancelled:
            raise CheckpointError("the save was interrupted")

    def cancel(self) -> None:
        """Let it fail after the piece at work, on all processes, and remove what is unfinished."""
        self._is_cancelled = True

    @property
    def over(self) -> bool:
        """Whether the save is over on this process."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, at most so long; returns :attr:`over`."""
        give_up = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if give_up is None else max(0.0, give_up - time.monotonic()))
        return self.over

    def wait_while_moving(self, patience: float) -> bool:
        """Wait until it is over, as long as this process moves a piece now and then; returns :attr:`over`.

        Args:
            patience: seconds without a piece after which it is left alone.
        """
        moved = -1
        while not self.over and moved != self.moved:
            moved = self.moved
            self.wait(patience)
        return self.over

    def end(self) -> None:
        """Take note that it is over, or that nobody waits for it any more."""
        if self._guard.snapshot is self.snapshot:
            self._guard.snapshot = None

    @property
    def path(self) -> Path:
        """The checkpoint's, once it is over.

        Raises:
            CheckpointError: on every process, if any failed: see ``save_checkpoint``.
        """
        if self.error is not None:
            raise self.error
        assert self._path is not None
        return self._path
