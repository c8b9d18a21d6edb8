"""Saves behind the training, one after the other, and what becomes of one that fails or hangs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gptpar.checkpoint import room
from gptpar.checkpoint.background import SaveUnderWay
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.save import snapshot_of
from gptpar.errors import CheckpointError, FolderTakenError, NotSavedError
from gptpar.system.regions import sizes_of_copies
from gptpar.system.snapshot import STILL_SECONDS, Snapshot, StateGuard
from gptpar.system.spare_memory import SpareMemory
from gptpar.topology.groups import Topology
from gptpar.topology.tensor_parts import TensorParts

FORGIVEN = 2
"""Saves in a row into one folder that may fail. A disk is full or gone for a while, and training should not end for it;
but each failed save puts one more interval of work at risk. So for the third one training stands still until it is on
the disk, and if that fails, too, it ends while three intervals at most are lost."""

LOOK_SECONDS = 0.5
"""Between two looks at the save of all processes."""

INTERRUPTED_SECONDS = 3.0
"""For which Ctrl-C waits until an unfinished checkpoint is removed."""

MEMORY_LOOK_SECONDS = 1.0
"""Between two looks whether the machine is short of memory."""

NO_LIMIT = timedelta(days=365)
"""Of the collectives of saves. A process that waits in one cannot tell a slow disk of another from a hung one; it is
:meth:`Saver.finish` that looks whether anybody still moves."""


@dataclass(frozen=True)
class Save:
    """What is to be saved.

    Attributes:
        folder: of the checkpoints.
        iteration: of the state.
        tensors: this process's parts, as they stand.
        write: ``save_checkpoint`` with all but ``process_group``, ``snapshot`` and ``moved``.
        permit: raises ``FolderTakenError``, on the main process, if the folder is another run's.
        files_in_memory: how many processes' files it brings into the host's memory, for each process.
        optional: training goes on without it, however often it fails.
        unguarded: whether a part is overwritten by somebody who does not ask first, so that it is cloned at once.
    """

    folder: Path
    iteration: int
    tensors: Mapping[str, TensorParts]
    write: Callable[..., Path]
    permit: Callable[[], None] = lambda: None
    files_in_memory: int = 0
    optional: bool = False
    unguarded: Callable[[torch.Tensor], bool] = lambda part: False


@dataclass(frozen=True)
class Saved:
    """A save that is on the disk.

    Attributes:
        stood_s: seconds for which training stood still.
        written_s: seconds from its begin to its end.
        most_kept: bytes of host memory for what was overwritten meanwhile.
        cloned: whether a GPU's part was cloned there.
    """

    save: Save
    path: Path
    stood_s: float
    written_s: float
    most_kept: int
    cloned: bool


class Saver:
    """Saves on all processes together: each calls the same methods in the same order.

    :meth:`poll` and :meth:`abandon` are for each process by itself. One save is under way at a time. Its collectives
    have a process group of their own.

    Args:
        topology: this process's place.
        guard: is asked by everything that overwrites what is saved, but for what a save calls unguarded.
        warn: tells of a save that failed.
        on_saved: is called on each process by itself when it finds that a save is on the disk.
        alive: is called while processes wait for a save: the launcher must not take them for hung before they say so.

    Attributes:
        under_way: the save of which this process has not seen the end; ``None``: there is none.
    """

    def __init__(
        self,
        topology: Topology,
        guard: StateGuard,
        warn: Callable[[str], None],
        on_saved: Callable[[Saved], None] = lambda saved: None,
        alive: Callable[[], None] = lambda: None,
    ):
        self._topology, self._guard, self._warn = topology, guard, warn
        self._on_saved, self._alive = on_saved, alive
        self._group: dist.ProcessGroup | None = None
        self._begun: Save | None = None  # on all processes alike, until they have come to `finish`
        self.under_way: SaveUnderWay | None = None
        self._error: BaseException | None = None  # that it ended with here
        self._stood_s, self._cloned = 0.0, False
        self._failures: dict[Path, int] = {}
        self._newest: dict[Path, int] = {}
        self._spare, self._device_room = SpareMemory(), room.DeviceRoom()
        self._looked, self._ends_at_exit = time.monotonic(), False

    def newest(self, folder: Path) -> int | None:
        """The iteration of the last save into a folder that all processes know to be on the disk."""
        return self._newest.get(folder)

    # Beginning.

    def prepare(self, tensors: Iterable[TensorParts]) -> None:
        """Get host memory for what steps overwrite during a save ready in the background, if there is plenty of it.

        Args:
            tensors: this process's parts of what will be saved.
        """
        on_host = (part for tensor in tensors for _, part in tensor.parts if not part.is_cuda)
        sizes = list(sizes_of_copies(on_host, self._guard.exchanged()))
        if sum(sizes) <= room.host_room() // 2:
            self._spare.limit_to(sum(sizes))
            self._spare.prepare(sizes)

    def begin(self, save: Save, *, behind: bool, required: bool = False) -> None:
        """Take the state as it stands, and write it: behind the training, or before this returns.

        Args:
            required: whether a failure before this returns is an error.

        Raises:
            CheckpointError: see :meth:`finish`; too many saves before have failed, and so does this one.
        """
        started = time.perf_counter()
        self.finish()
        is_last = not save.optional and self._failures.get(save.folder, 0) >= FORGIVEN
        behind = behind and not is_last
        snapshot, has_room = self._snapshot(save, behind)
        behind = behind and not self._topology.any_rank(not has_room)
        group = self._group_of_saves()
        write = partial(save.write, process_group=group, snapshot=snapshot)
        self._begun = save
        self.under_way = SaveUnderWay(save.iteration, snapshot, lambda moved: write(moved=moved), self._guard)
        self._stood_s = time.perf_counter() - started
        if behind and not self._ends_at_exit:
            self._ends_at_exit = True
            # Later, and so in what `atexit` has, Python lets nobody begin a thread, and a save needs some.
            threading._register_atexit(_end_at_exit, weakref.ref(self))  # type: ignore[attr-defined]
        if not behind:
            self.finish(required=required or is_last)

    def _group_of_saves(self) -> dist.ProcessGroup | None:
        """Made at the first save, once all processes have come to it: making it has no limit of time, either."""
        if self._group is None and self._topology.layout.world_size > 1:
            self._topology.any_rank(False)
            self._group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        return self._group

    def _snapshot(self, save: Save, behind: bool) -> tuple[Snapshot, bool]:
        """The state as it stands, and whether it may be overwritten meanwhile: not where a clone has no room."""
        self._cloned, tensors = False, save.tensors
        if not behind:
            return snapshot_of(tensors), True
        parts = [part for tensor in tensors.values() for _, part in tensor.parts]
        unguarded = list(filter(save.unguarded, parts))
        free = self._room_beside(save, parts, unguarded)
        clones = self._may_clone(parts)
        if free < 0 or not (clones or self._may_clone(unguarded)):
            return snapshot_of(tensors), False
        self._spare.limit_to(free)
        make = partial(snapshot_of, tensors, free, spare=self._spare, exchanged=list(self._guard.exchanged()))
        try:
            snapshot = make(clones=lambda part: (clones and part.is_cuda) or save.unguarded(part))
        except torch.OutOfMemoryError:  # free memory in pieces that are too small
            return (snapshot_of(tensors), False) if unguarded else (make(), True)
        self._cloned = clones and any(part.is_cuda for part in parts)
        return snapshot, True

    def _room_beside(self, save: Save, parts: list[torch.Tensor], unguarded: list[torch.Tensor]) -> int:
        """Bytes of host memory for copies, beside clones of what is unguarded; negative: they have no room."""
        free = room.host_room(self._spare.num_bytes)
        written = save.files_in_memory * sum(part.nbytes for part in parts)
        free = max(0, free - written)
        return free - sum(part.nbytes for part in unguarded if not part.is_cuda)

    def _may_clone(self, parts: list[torch.Tensor]) -> bool:
        """Whether the GPU has room for clones of those of these tensors that are there."""
        on_gpu = [part for part in parts if part.is_cuda]
        return not on_gpu or self._device_room.may_clone(on_gpu[0].device, sum(part.nbytes for part in on_gpu))

    # Ending.

    def poll(self) -> None:
        """Take note of a save that is over by now; between two, give memory back if the machine is short of it."""
        if self.under_way is not None:
            if self.under_way.over:
                self._take_note()
        elif self._spare.num_bytes and time.monotonic() - self._looked > MEMORY_LOOK_SECONDS:
            self._looked = time.monotonic()
            self._spare.limit_to(room.host_room(self._spare.num_bytes))

    def finish(self, *, required: bool = False) -> None:
        """Wait on all processes for the save that was begun last, if there is one.

        One that failed is told, and forgiven: older checkpoints are whole, and the next save tries again.

        Args:
            required: whether a failure is an error.

        Raises:
            NotSavedError: on every process: it failed and was required, or it hangs.
            CheckpointError: on every process: the folder is no longer this run's.
        """
        save = self._begun
        if save is None:
            return
        try:
            has_failed, is_broken = self._wait(save, required)
        except KeyboardInterrupt:
            if self.under_way is not None:
                self.under_way.cancel()
                self.under_way.wait(INTERRUPTED_SECONDS)
                self.under_way.end()
                self.under_way = None
            raise
        finally:
            self._begun = None
        error, self._error = self._error, None
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        if is_broken:
            raise CheckpointError(f"the save of iteration {save.iteration} failed on another process, which says why.")
        if not has_failed:
            self._failures.pop(save.folder, None)
            self._newest[save.folder] = save.iteration
            return
        self._failures[save.folder] = self._failures.get(save.folder, 0) + 1
        self._require_folder(save)
        if required:
            raise NotSavedError(f"{_sentence(error)} {self._not_saved(save)}") from error

    def _require_folder(self, save: Save) -> None:
        """Raise on all processes if the folder is another run's; that nothing can be read there is known."""
        try:
            Ranks(None).lead(save.permit)
        except FolderTakenError:
            raise
        except CheckpointError:
            pass

    def _wait(self, save: Save, required: bool) -> tuple[bool, bool]:
        """Wait as long as any process's save moves, in steps: no collective waits for longer than a moment.

        Returns:
            (whether it failed on any process, whether on any with an error that is none of checkpoints)
        """
        started, moved_before, since, is_late = time.perf_counter(), -1.0, time.monotonic(), False
        stands = self.under_way is not None and not self.under_way.over
        while True:
            self._alive()
            under_way = self.under_way
            if under_way is not None and under_way.wait(LOOK_SECONDS):
                self._stood_s += time.perf_counter() - started if stands else 0.0
                self._take_note(required)
            moved = 0 if under_way is None else under_way.moved
            failed, broken = self._error is not None, not isinstance(self._error, CheckpointError | None)
            mine = [self.under_way is not None, failed, broken, is_late, moved]
            waiting, fails, breaks, late, moved_now = self._topology.sum_over_all(
                torch.tensor(mine, dtype=torch.float64, device=self._topology.votes_device)
            ).tolist()
            if not waiting:
                return fails > 0, breaks > 0
            if late:
                self._leave(save)
            if moved_now != moved_before:
                moved_before, since = moved_now, time.monotonic()
            is_late = time.monotonic() - since > STILL_SECONDS

    def _leave(self, save: Save) -> NoReturn:
        """Nobody has moved for too long: the thread that waits for the disk is left alone."""
        if self.under_way is not None:
            self.under_way.end()
            self.under_way = None
        raise NotSavedError(
            f"the save of iteration {save.iteration} hangs: no process has written or read a piece in {save.folder} "
            f"for {STILL_SECONDS / 60:g} minutes, so that its file system does not answer. Older checkpoints are "
            f"whole. {self._not_saved(save)}"
        )

    def _take_note(self, required: bool = False) -> None:
        """This process has seen the end of the save."""
        under_way, save, self.under_way = self.under_way, self._begun, None
        assert under_way is not None and save is not None
        under_way.end()
        self._error = error = under_way.error
        if error is None:
            stood_s = self._stood_s + under_way.snapshot.waited_s
            kept = under_way.snapshot.most_kept
            self._on_saved(Saved(save, under_way.path, stood_s, under_way.seconds, kept, self._cloned))
        elif not required:
            self._warn(self._warning(save, error))

    def _warning(self, save: Save, error: BaseException) -> str:
        number = self._failures.get(save.folder, 0) + 1
        following = "the next save tries again"
        if number >= FORGIVEN and not save.optional:
            following = f"training stands still for the next save, and ends if that fails, too ({number} have in a row)"
        return (
            f"WARNING: the save of iteration {save.iteration} to {save.folder} failed: {_sentence(error)} Older "
            f"checkpoints are whole, and training goes on; {following}. Until then, free space there, or mend the file "
            "system."
        )

    def _not_saved(self, save: Save) -> str:
        newest = self._newest.get(save.folder)
        lost = (
            "nothing that this run has learnt is" if newest is None else f"the steps since iteration {newest} are lost"
        )
        return (
            f"Free space in {save.folder}, or mend its file system, and go on from the newest checkpoint there. The "
            f"newest state, of iteration {save.iteration}, is not on the disk: {lost}."
        )

    def abandon(self, patience: float) -> str | None:
        """Where other processes may be gone: let this one's save end, as long as it moves.

        Args:
            patience: seconds without a piece after which it is left alone.

        Returns:
            A sentence on a save that is not on the disk; ``None``: there is none.
        """
        under_way, save, told = self.under_way, self._begun, None
        if under_way is not None and save is not None:
            if not under_way.wait_while_moving(patience):
                told = f"the save of iteration {save.iteration} to {save.folder} did not end"
            elif under_way.error is not None:
                told = f"{_sentence(under_way.error)} {self._not_saved(save)}"
            else:
                self._take_note()
            under_way.end()
        self._begun = self.under_way = None
        return told

    def abandon_at_exit(self) -> None:
        """A script may end without closing anything, while a save is under way."""
        if (told := self.abandon(STILL_SECONDS)) is not None:
            self._warn(f"WARNING: {told}")


def _end_at_exit(saver: weakref.ref[Saver]) -> None:
    if (one := saver()) is not None:
        one.abandon_at_exit()


def _sentence(error: BaseException | None) -> str:
    """What went wrong, with its full stop."""
    text = "the save failed on another process, which says why" if error is None else str(error) or repr(error)
    return text if text.endswith((".", "!")) else f"{text}."
