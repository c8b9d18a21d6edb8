"""The memory mirror: copies of the state in this machine's memory, which outlive the processes.

A copy is a checkpoint like any other, in a folder that the launcher keeps in memory: pieces with CRC-32, published by
one rename, loaded by the same code into any layout. While one is written the one before it stays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from gptpar.checkpoint import find_checkpoints
from gptpar.checkpoint.folders import remove_checkpoint
from gptpar.checkpoint.ranks import Ranks
from gptpar.errors import GptparError
from gptpar.reporting.banner import format_bytes
from gptpar.system.host import available_memory
from gptpar.system.restart import memory_folder
from gptpar.training.progress import Progress
from gptpar.training.resume import checkpoint_tensors
from gptpar.training.saving import Saving, Target
from gptpar.training.trainer import Trainer

COPIES = 2
"""One that is whole, and one that is being written."""


class Mirror:
    """Copies a run's state into memory; every process has one and calls the same methods.

    Args:
        folder: in memory, of all processes of the run.
        interval: steps between copies.
    """

    def __init__(self, folder: Path, interval: int):
        self._folder, self._interval = folder, interval
        self._ranks = Ranks(None)

    def is_due(self, iteration: int) -> bool:
        """Whether a copy is made after this iteration."""
        return iteration % self._interval == 0

    def prepare(self, trainer: Trainer, iteration: int) -> int:
        """Remove copies of a future that is taken again, and look for room; returns the bytes of one copy.

        Raises:
            GptparError: memory has too little room.
        """
        needed = self._bytes_of_copy(trainer)
        self._ranks.lead(lambda: self._prepare(needed, iteration))
        return needed

    def save(self, saving: Saving, progress: Progress) -> None:
        """Copy the state of this moment, behind the training."""
        saving.finish()
        self._ranks.lead(lambda: self._keep(1, progress.iteration))
        saving.begin(Target(self._folder, None, None, None, in_memory=True), progress, keep_all=True)

    def _keep(self, count: int, iteration: int) -> None:
        """Remove all copies but the newest ones up to an iteration."""
        found = find_checkpoints(self._folder)
        kept = [path for number, path in found if number <= iteration][:count]
        for _, path in found:
            if path not in kept:
                remove_checkpoint(path)

    def _prepare(self, needed: int, iteration: int) -> None:
        self._keep(COPIES, iteration)
        held = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        disk = os.statvfs(self._folder)
        free = {
            f"the file system of {self._folder.parent}": disk.f_bavail * disk.f_frsize,
            "this machine": available_memory() or math.inf,
        }
        for place, room in free.items():
            if COPIES * needed > room + held:
                raise GptparError(
                    f"--mirror-interval {self._interval} keeps {COPIES} copies of {format_bytes(needed)} in memory, "
                    f"and {place} has room for {format_bytes(int(room) + held)}: leave it out and save more often, "
                    "spread the run over more machines, or give that file system more of a larger memory "
                    "(mount -o remount,size=...)."
                )

    def _bytes_of_copy(self, trainer: Trainer) -> int:
        """Of the whole state: what several processes hold is written once."""
        tensors = checkpoint_tensors(trainer, with_moments=True)
        mine = {name: math.prod(one.shape) * one.dtype.itemsize for name, one in tensors.items()}
        everyones: dict[str, int] = {}
        for found in self._ranks.each(lambda: mine):
            everyones |= found
        return sum(everyones.values())


def open_mirror(interval: int | None, trainer: Trainer, iteration: int, say: Callable[[str], None]) -> Mirror | None:
    """The run's mirror, if it asks for one, with room for it.

    Raises:
        GptparError: nobody would load it, or memory has too little room.
    """
    if interval is None:
        return None
    folder = memory_folder()
    if folder is None:
        raise GptparError(
            f"--mirror-interval {interval} needs a launcher on this one machine that restarts, and a folder /dev/shm: "
            "add --max-restarts, or leave it out."
        )
    mirror = Mirror(folder, interval)
    needed = mirror.prepare(trainer, iteration)
    say(f" > memory mirror: {format_bytes(needed)} each {interval} steps into {folder}, the last two kept")
    return mirror
