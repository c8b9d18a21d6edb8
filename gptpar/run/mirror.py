"""The memory mirror: saves copies of the state to the machines' memories, which outlive the processes.

A copy is a checkpoint like any other, in a folder in memory: pieces with CRC-32, published by one rename, loaded by the
same code into any layout. While one is written the one before it stays. Of several machines each keeps the files of its
own processes and those of the machine before it (``gptpar.checkpoint.copies``); one machine is a ring of one.
"""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptpar.checkpoint import find_checkpoints
from gptpar.checkpoint.copies import Copies
from gptpar.checkpoint.folders import remove_checkpoint
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.ring import COPIES, Ring
from gptpar.checkpoint.storage import who_writes
from gptpar.config import CheckpointConfig, Config
from gptpar.errors import GptparError
from gptpar.reporting.banner import format_bytes
from gptpar.run.progress import Progress
from gptpar.run.resume import goes_on
from gptpar.run.saved_state import checkpoint_tensors
from gptpar.run.saving import Saving, Target
from gptpar.run.trainer import Trainer
from gptpar.system.host import available_memory
from gptpar.system.restart import MEMORY_VARIABLE, has_launcher_that_restarts, memory_folder

NAME = "machine"
"""A link in the folder, to a name that no other machine's folder has."""


class Mirror:
    """Copies a run's state into memory; every process has one and calls the same methods.

    Args:
        copies: of all machines.
        interval: steps between copies.
    """

    def __init__(self, copies: Copies, interval: int):
        self._folder, self._ring, self._ranks = copies.folder, copies.ring, copies.ranks
        self._interval = interval

    def is_due(self, iteration: int) -> bool:
        """Whether a copy is made after this iteration."""
        return iteration % self._interval == 0

    def prepare(self, trainer: Trainer, iteration: int) -> int:
        """Remove copies of a future that is taken again, and look for room.

        Returns:
            The bytes that one copy takes of the machine that keeps most of it.

        Raises:
            GptparError: a machine's memory has too little room.
        """
        sizes, loaded = who_writes(self._ranks, checkpoint_tensors(trainer))
        self._ranks.lead(lambda: self._keep(COPIES, iteration))
        self._ranks.lead(lambda: self._require_room(sizes, loaded))
        return max(self._bytes_of(self._ring.kept_by(machine), sizes) for machine in range(len(self._ring.machines)))

    def save(self, saving: Saving, progress: Progress) -> None:
        """Copy the state of this moment, behind the training."""
        saving.finish()
        self._ranks.lead(lambda: self._keep(1, progress.iteration - 1))
        target = Target(self._folder, None, None, None, in_memory=True, ring=self._ring)
        saving.begin(target, progress, keep_all=True)

    def _keep(self, count: int, iteration: int) -> None:
        """Remove all copies but the newest ones up to an iteration."""
        found = find_checkpoints(self._folder)
        kept = [path for number, path in found if number <= iteration][:count]
        for _, path in found:
            if path not in kept:
                remove_checkpoint(path)

    @staticmethod
    def _bytes_of(ranks: tuple[int, ...], sizes: list[int]) -> int:
        return sum(sizes[rank] for rank in ranks)

    def _require_room(self, sizes: list[int], loaded: list[set[int]]) -> None:
        """Require room on this machine.

        Args:
            sizes: bytes of each rank's file.
            loaded: whose files each rank loads after a death.
        """
        machine = self._ring.machine_of(self._ranks.rank)
        mine, before, kept = self._ring.machines[machine], self._ring.before(machine), self._ring.kept_by(machine)
        others = set().union(*(loaded[rank] for rank in mine)) - set(kept)
        own, neighbours, fetched = (self._bytes_of(tuple(ranks), sizes) for ranks in (mine, before, others))
        needed = COPIES * (own + neighbours) + fetched
        held = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        disk = os.statvfs(self._folder)
        here = "this machine" if self._ring.is_alone else f"the machine {os.uname().nodename}"
        free = {
            f"the file system of {self._folder.parent}": disk.f_bavail * disk.f_frsize,
            here: available_memory() or math.inf,
        }
        what = format_bytes(own)
        if not self._ring.is_alone:
            what += f" of the machine's own state and {format_bytes(neighbours)} of its neighbour's"
            what += f" (and {format_bytes(fetched)} of others' once, when it is loaded)" if fetched else ""
        for place, room in free.items():
            if needed > room + held:
                raise GptparError(
                    f"--mirror-interval {self._interval} keeps {COPIES} copies of {what} in memory, "
                    f"and {place} has room for {format_bytes(int(room) + held)}: leave it out and save more often, "
                    "spread the run over more machines, or give that file system more of a larger memory "
                    "(mount -o remount,size=...)."
                )


def open_copies(config: Config, say: Callable[[str], None]) -> Copies | None:
    """The copies that earlier starts of these processes have left, if the run makes any; all have the newest one then.

    Raises:
        GptparError: on every process: nobody would load copies, or a folder is not this user's alone.
    """
    interval = config.recovery.mirror_interval
    if interval is None:
        return None
    names = Ranks(None).each(lambda: _name_of(_own_folder(interval, config.checkpoint)))
    folder = memory_folder()
    assert folder is not None
    copies = Copies(folder, Ring.of(names), lambda sentence: say(f" > {sentence}"))
    copies.agree()
    return copies


def restore(copies: Copies | None, trainer: Trainer) -> None:
    """Bring back what this machine has lost of the newest copy, before that is loaded."""
    if copies is not None:
        copies.complete(checkpoint_tensors(trainer))


def open_mirror(copies: Copies | None, trainer: Trainer, iteration: int, say: Callable[[str], None]) -> Mirror | None:
    """The run's mirror, if it asks for one, with room for it.

    Raises:
        GptparError: a machine's memory has too little room.
    """
    interval = trainer.config.recovery.mirror_interval
    if copies is None or interval is None:
        return None
    mirror = Mirror(copies, interval)
    needed = format_bytes(mirror.prepare(trainer, iteration))
    machines = len(copies.ring.machines)
    what = needed if machines == 1 else f"its own and its neighbour's files on each of {machines} machines, {needed},"
    say(f" > memory mirror: {what} each {interval} steps into {copies.folder}, the last two kept")
    return mirror


def _own_folder(interval: int, checkpoint: CheckpointConfig) -> Path:
    """This machine's folder, made if it is not there.

    Raises:
        GptparError: there is none, or it is not for this user alone; or restarts would differ from process to process.
    """
    folder = memory_folder()
    if folder is None:
        raise GptparError(
            f"--mirror-interval {interval} needs a launcher that restarts, and a folder /dev/shm: add --max-restarts "
            f"(of gptpar launch where there are several machines); or name a folder in memory in {MEMORY_VARIABLE}, a "
            "new one for each run; or leave it out."
        )
    c = checkpoint
    begins = c.begins_anew or c.no_load_lr_state or c.no_load_optim or c.ckpt_step is not None
    if not has_launcher_that_restarts() and (begins or not goes_on(c)):
        raise GptparError(
            f"--mirror-interval {interval} with torchrun or another launcher than gptpar pretrain: the processes of a "
            "replaced machine have to go on as the others do: give --load the folder of --save, without --finetune, "
            "--reset-iteration, --no-load-lr-state, --no-load-optim and --ckpt-step."
        )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise GptparError(
            f"{folder}, which {MEMORY_VARIABLE} names, is no folder of this user alone: remove it, or name another one "
            "(chmod 700)."
        )
    return folder


def _name_of(folder: Path) -> str:
    """A name that is the same for all processes that see this folder, and for no others."""
    with suppress(FileExistsError):
        (folder / NAME).symlink_to(secrets.token_hex(16))
    return os.readlink(folder / NAME)
