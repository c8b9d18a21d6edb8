"""The thread that writes a save while training goes on and overwrites the state being saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptpar.errors import CheckpointError
from gptpar.system.limits import usable_cores
from gptpar.system.snapshot import Snapshot
from gptpar.system.state_guard import StateGuard

MAX_COPIERS = 8

Write = Callable[[Callable[[], None]], Path]
"""Saves a snapshot and returns the checkpoint's path; its argument is a function to call after each piece."""


def num_copiers() -> int:
    """Threads that copy ahead of the training. One copies 5 to 10 GB/s; memory has bandwidth for several."""
    return max(2, min(MAX_COPIERS, usable_cores() // 2))


class SaveUnderWay:
    """Writes a snapshot. Training waits only before it overwrites bytes that are neither written nor copied yet.

    Args:
        iteration: the iteration of the state.
        snapshot: the state to be written.
        write: saves the snapshot. Its process group must be one that nobody else uses meanwhile.
        guard: everything that overwrites tensors of the snapshot asks it first.

    Attributes:
        iteration: as given.
        snapshot: as given.
        seconds: time that writing took; 0 until the save is over.
        moved: pieces that this process has written or read back. While the number grows, the disk answers.
        error: the exception that ended the save; ``None``: none so far.
    """

    def __init__(self, iteration: int, snapshot: Snapshot, write: Write, guard: StateGuard):
        self.iteration, self.snapshot, self.seconds, self.moved = iteration, snapshot, 0.0, 0
        self._write, self._guard = write, guard
        self._path: Path | None = None
        self.error: BaseException | None = None
        self._is_cancelled = False
        guard.snapshot = snapshot
        writer = threading.Thread(target=self._run, name="gptpar-save", daemon=True)
        copiers = [
            threading.Thread(target=snapshot.copy_ahead, name="gptpar-save-copies", daemon=True)
            for _ in range(num_copiers() if snapshot.room else 0)
        ]
        self._threads = [thread for thread in (*copiers, writer) if _starts(thread)]
        if writer not in self._threads:
            self._run()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._path = self._write(self._note_piece)
        except BaseException as error:  # `Saver` raises it, or forgives it
            self.error = error
        finally:
            self.seconds = time.perf_counter() - started
            self.snapshot.close()  # wakes whoever waits to overwrite a tensor

    def _note_piece(self) -> None:
        self.moved += 1  # two threads may lose a count; the number still grows
        if self._is_cancelled:
            raise CheckpointError("the save was interrupted")

    def cancel(self) -> None:
        """Make the save fail on all processes after the present piece, and remove the unfinished checkpoint."""
        self._is_cancelled = True

    @property
    def over(self) -> bool:
        """Whether the save is over on this process."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the save is over, for at most ``seconds``; returns :attr:`over`."""
        give_up = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if give_up is None else max(0.0, give_up - time.monotonic()))
        return self.over

    def wait_while_moving(self, patience: float) -> bool:
        """Wait until the save is over, as long as this process moves pieces; returns :attr:`over`.

        Args:
            patience: seconds without a moved piece after which waiting ends.
        """
        moved = -1
        while not self.over and moved != self.moved:
            moved = self.moved
            self.wait(patience)
        return self.over

    def end(self) -> None:
        """Detach the snapshot from the guard: the save is over, or nobody waits for it any more."""
        if self._guard.snapshot is self.snapshot:
            self._guard.snapshot = None

    @property
    def path(self) -> Path:
        """The checkpoint's path, once the save is over.

        Raises:
            CheckpointError: on every process, if any process failed: see ``save_checkpoint``.
        """
        if self.error is not None:
            raise self.error
        assert self._path is not None
        return self._path


def _starts(thread: threading.Thread) -> bool:
    """Start a thread; False if the system has no more of them (``ulimit -u``), or no memory for one."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
