"""The ``--save`` folder during a run: taken at the start, put in order before the first step, given back at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptpar.checkpoint.folders import find_checkpoints
from gptpar.checkpoint.ranks import Ranks
from gptpar.errors import CheckpointError
from gptpar.reporting import event_files, metrics_file
from gptpar.run.run_folder.branches import finish_branches, is_inside, leave_branch
from gptpar.run.run_folder.owner import Owner, is_seen

SEEN_SECONDS = 30.0
"""Longest delay until another machine's new file appears; network file systems keep lists of names for seconds."""


class RunFolder:
    """A run's claim to its folder: every process has one and calls the same methods, and the main one works for all.

    An error of the main process is raised in all of them.

    Args:
        root: the folder.
        tensorboard: where this run's event files are; left alone where that is outside ``root``.
        say: prints a line.
    """

    def __init__(self, root: Path, tensorboard: Path | None, say: Callable[[str], None]):
        self._root, self._say = root, say
        self._tensorboard = tensorboard if tensorboard is not None and is_inside(tensorboard, root) else None
        self._owner: Owner | None = None
        self._ranks = Ranks(None)

    def take(self) -> None:
        """Own the folder, and finish what a run that was killed had begun to move; before anything is loaded.

        Raises:
            CheckpointError: another run writes there, or not all machines see the same folder.
        """
        token, host = self._ranks.lead(self._take)
        self._ranks.each(lambda: self._require_shared(token, host))

    def _take(self) -> tuple[str, str]:
        self._owner = Owner(self._root, self._say)
        finish_branches(self._root, self._say)
        return self._owner.token, os.uname().nodename

    def _require_shared(self, token: str, host: str) -> None:
        """Refuse a folder that this process cannot see: each process writes its part of a checkpoint there."""
        if not is_seen(self._root, token, SEEN_SECONDS):
            raise CheckpointError(
                f"{self._root} on {os.uname().nodename} is not the folder of this name on {host}: what {host} wrote "
                f"there has not appeared for {SEEN_SECONDS:g} s. Name a folder on a file system that all machines share"
            )

    def go_on_from(self, iteration: int, consumed_samples: int, *, anew: bool, chosen: bool) -> None:
        """Make the folder's numbers those of this run, after everything was loaded and before the first step.

        Args:
            iteration: the last one that is done, 0 at the beginning.
            anew: the run begins at iteration 0 and none of the folder's checkpoints is of its own history.
            chosen: the iteration was asked for; else it is the newest whole one, and later ones are damaged.
        """
        damaged = not (anew or chosen)
        self._ranks.lead(lambda: self._go_on_from(-1 if anew else iteration, consumed_samples, damaged))

    def _go_on_from(self, iteration: int, consumed_samples: int, damaged: bool) -> None:
        leave_branch(self._root, iteration, consumed_samples, self._tensorboard, self._say, damaged=damaged)
        if self._tensorboard is not None:
            self._put_curves_in_order(self._tensorboard, iteration, consumed_samples)

    def _put_curves_in_order(self, tensorboard: Path, iteration: int, consumed_samples: int) -> None:
        """Drop the events of steps that are taken again, or set a former beginning's aside.

        metrics.jsonl shows if there are any, as after a crash.
        """
        last = metrics_file.last_iteration(self._root / metrics_file.FILE_NAME)
        if iteration > 0 and last is not None and last <= iteration:
            return
        try:
            if iteration > 0:
                event_files.cut_after(tensorboard, iteration, consumed_samples)
            else:
                event_files.set_aside(tensorboard)
        except OSError as error:
            self._say(f" > TensorBoard's curves will overlap from iteration {iteration} on: {error.strerror}")

    def is_beyond(self, iteration: int) -> bool:
        """Whether the folder holds checkpoints of later iterations."""
        return any(number > iteration for number, _ in find_checkpoints(self._root))

    def require_owner(self) -> None:
        """Called by the main process before it writes or deletes a checkpoint.

        Raises:
            CheckpointError: the folder is another run's now.
        """
        if self._owner is not None:
            self._owner.require()

    def close(self) -> None:
        """Give the folder back."""
        if self._owner is not None:
            self._owner.close()


@contextmanager
def open_run_folder(root: Path, tensorboard: Path | None, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Own the run's folder inside the block, as the only run.

    Raises:
        CheckpointError: another run writes there, or nothing can be written.
    """
    folder = RunFolder(root, tensorboard, say)
    try:
        folder.take()
        yield folder
    finally:
        folder.close()
