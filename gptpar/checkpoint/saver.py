"""``Saver`` starts saves in the background, decides how many failures it forgives, and notices a hung disk."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gptpar.checkpoint import room
from gptpar.checkpoint.background import SaveUnderWay
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.save_request import Save, Saved
from gptpar.errors import CheckpointError, FolderTakenError, NotSavedError
from gptpar.system.regions import sizes_of_copies
from gptpar.system.snapshot import STILL_SECONDS, Snapshot
from gptpar.system.spare_memory import SpareMemory
from gptpar.system.state_guard import StateGuard
from gptpar.system.switch_interval import SWITCH_INTERVAL
from gptpar.topology.groups import Topology
from gptpar.topology.tensor_parts import TensorParts, joined, tensors_of

FORGIVEN = 2
"""Number of saves in a row into one folder that may fail.

A disk may be full or gone for a while, and training should not end for that. But each failed save puts one more save
interval at risk. So training stands still for the third save. If that save fails, too, training ends, and at most three
intervals are lost."""

LOOK_SECONDS = 0.5
"""Time between two looks at the progress of a save on all processes."""

INTERRUPTED_SECONDS = 3.0
"""After Ctrl-C, the longest wait for the removal of an unfinished checkpoint."""

MEMORY_LOOK_SECONDS = 1.0
"""Time between two checks whether the machine is short of memory."""

NO_LIMIT = timedelta(days=365)
"""Timeout of the collectives of saves. A process that waits in a collective cannot tell whether another process's disk
is slow or hung. :meth:`Saver.finish` checks instead whether any process still moves pieces."""


class Saver:
    """Saves on all processes together: each process calls the same methods in the same order.

    Only :meth:`poll` and :meth:`abandon` are called by one process alone. One save is under way at a time. Its
    collectives have a process group of their own. The state of an object:

    ==================  ============================================================================================
    ``under_way``       the save whose end this process has not seen. Processes may see the end at different times
    ``_begun``          the request of the newest save. It is the same on all processes, and is cleared by
                        :meth:`finish`
    ``_error``          error of the save whose end was seen last, on this process, until :meth:`finish` takes it
    ``_failures``,      folder -> number of failed saves in a row, and iteration of the newest save on the disk: the
    ``_newest``         same on all processes, because :meth:`finish` alone writes them
    ``_group``          the process group of saves, made by the first save of several processes
    ``_stood_s``,       seconds that the save has stopped training, and whether the save has clones on
    ``_cloned``         the GPU
    ``_spare``          host memory for copies, kept from save to save; ``_looked``: the time of its last check
    ``_ends_at_exit``   whether the handler for the end of the process is registered
    ==================  ============================================================================================

    Args:
        topology: this process's place.
        guard: is asked before a saved tensor is overwritten, unless ``save.unguarded`` is true for it.
        warn: prints the warning of a failed save.
        on_saved: is called on a process when that process finds that a save is on the disk.
        alive: is called while processes wait for a save, so that the launcher does not take them for hung.

    Attributes:
        under_way: see above; ``None``: there is none.
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
        self._begun: Save | None = None
        self.under_way: SaveUnderWay | None = None
        self._error: BaseException | None = None
        self._stood_s, self._cloned = 0.0, False
        self._failures: dict[Path, int] = {}
        self._newest: dict[Path, int] = {}
        self._spare, self._device_room = SpareMemory(), room.DeviceRoom()
        self._looked, self._ends_at_exit = time.monotonic(), False

    def newest(self, folder: Path) -> int | None:
        """The iteration of the newest save into a folder that is on the disk, as all processes know."""
        return self._newest.get(folder)

    # Beginning.

    def prepare(self, tensors: Iterable[TensorParts]) -> None:
        """Prepare host memory for copies of a save in the background, if the copies need at most half of what is free.

        Args:
            tensors: this process's parts of the tensors that will be saved.
        """
        on_host = (part for part in tensors_of(tensors) if not part.is_cuda)
        sizes = list(sizes_of_copies(on_host, self._guard.exchanged()))
        if sum(sizes) <= room.host_room() // 2:
            self._spare.limit_to(sum(sizes))
            self._spare.prepare(sizes)

    def begin(self, save: Save, *, behind: bool, required: bool = False, since: float | None = None) -> None:
        """Take a snapshot of the state, and write it: behind the training, or before this method returns.

        Args:
            save: the state and the folder.
            behind: whether training may go on meanwhile.
            required: whether a failure before this method returns is an error.
            since: when training began to stand still (:func:`time.perf_counter`); default: now.

        Raises:
            CheckpointError: see :meth:`finish`; or this save fails after too many failed saves in a row.
        """
        started = time.perf_counter() if since is None else since
        self.finish()
        is_last = not save.optional and self._failures.get(save.folder, 0) >= FORGIVEN
        behind = behind and not is_last
        snapshot, has_room = self._snapshot(save, behind)
        behind = behind and not self._topology.any_rank(not has_room)
        if self._group is None and self._topology.mesh.world_size > 1:
            self._topology.any_rank(False)  # all processes have come to the first save: making a group has no timeout
            self._group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._begun = save
        self.under_way = SaveUnderWay(save.iteration, snapshot, partial(self._write, save, snapshot), self._guard)
        self._stood_s = time.perf_counter() - started
        if behind and not self._ends_at_exit:
            self._ends_at_exit = True
            # A save begins threads. Python refuses new threads once handlers of `atexit` run; this handler runs before.
            threading._register_atexit(_end_at_exit, weakref.ref(self))  # type: ignore[attr-defined]
        if not behind:
            self.finish(required=required or is_last)

    def _write(self, save: Save, snapshot: Snapshot, moved: Callable[[], None]) -> Path:
        """Take the late parts, and write all parts; in the thread of the save."""
        late: dict[str, TensorParts] = {}

        def take() -> None:
            if save.late is not None:
                state, exchanged = save.late(), list(self._guard.exchanged())
                snapshot.hold(state.blocks)  # the next step may be requested, and exchange blocks
                late.update(state.tensors())
                snapshot.add(tensors_of(late.values()), exchanged)

        with SWITCH_INTERVAL.short():
            Ranks(self._group).each(take)
        tensors = joined(save.tensors, late)
        return save.write(tensors=tensors, process_group=self._group, snapshot=snapshot, moved=moved)

    def _snapshot(self, save: Save, behind: bool) -> tuple[Snapshot, bool]:
        """A snapshot of the state, and whether training may go on meanwhile: not if a needed clone has no room."""
        self._cloned, parts = False, tensors_of(save.tensors.values())
        take = partial(Snapshot, parts, more=save.late is not None)
        if not behind:
            return take(), True
        unguarded = list(filter(save.unguarded, parts))
        free = self._room_beside(save, parts, unguarded)
        clones = self._may_clone(parts)
        if free < 0 or not (clones or self._may_clone(unguarded)):
            return take(), False
        self._spare.limit_to(free)
        make = partial(take, room=free, spare=self._spare, exchanged=list(self._guard.exchanged()))
        try:
            snapshot = make(clones=lambda part: (clones and part.is_cuda) or save.unguarded(part))
        except torch.OutOfMemoryError:  # free memory is fragmented
            return (take(), False) if unguarded else (make(), True)
        self._cloned = clones and any(part.is_cuda for part in parts)
        return snapshot, True

    def _room_beside(self, save: Save, parts: list[torch.Tensor], unguarded: list[torch.Tensor]) -> int:
        """Bytes of host memory left for copies after clones of unguarded parts; negative: the clones have no room."""
        num_bytes = sum(part.nbytes for part in parts) + save.late_bytes
        free = max(0, room.host_room(self._spare.num_bytes) - save.files_in_memory * num_bytes)
        return free - sum(part.nbytes for part in unguarded if not part.is_cuda)

    def _may_clone(self, parts: list[torch.Tensor]) -> bool:
        """Whether the GPU has room for clones of the tensors among these that are on it."""
        on_gpu = [part for part in parts if part.is_cuda]
        return not on_gpu or self._device_room.may_clone(on_gpu[0].device, sum(part.nbytes for part in on_gpu))

    # Ending.

    def poll(self) -> None:
        """Take note of a save that has ended; between saves, give memory back if the machine is short of it."""
        if self.under_way is not None:
            if self.under_way.over:
                self._take_note()
        elif self._spare.num_bytes and time.monotonic() - self._looked > MEMORY_LOOK_SECONDS:
            self._looked = time.monotonic()
            self._spare.limit_to(room.host_room(self._spare.num_bytes))

    def finish(self, *, required: bool = False) -> None:
        """Wait on all processes for the save that was begun last, if there is one.

        A failed save is reported and forgiven: older checkpoints are whole, and the next save tries again.

        Args:
            required: whether a failure is an error.

        Raises:
            NotSavedError: on every process: the save failed and was required, or it hangs.
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
        try:
            Ranks(None).lead(save.permit)
        except FolderTakenError:
            raise
        except CheckpointError:  # it is reported already
            pass
        if required:
            raise NotSavedError(f"{_sentence(error)} {self._not_saved(save)}") from error

    def _wait(self, save: Save, required: bool) -> tuple[bool, bool]:
        """Wait as long as any process's save moves pieces. Each step is short, so that no collective waits long.

        Returns:
            (whether the save failed on any process, whether any process's error is not a ``CheckpointError``)
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
        """No process has moved a piece for too long: leave the thread that waits for the disk, and raise."""
        if self.under_way is not None:
            self.under_way.end()
            self.under_way = None
        raise NotSavedError(
            f"the save of iteration {save.iteration} hangs: no process has written or read a piece in {save.folder} "
            f"for {STILL_SECONDS / 60:g} minutes. The file system does not answer. Older checkpoints are whole. "
            f"{self._not_saved(save)}"
        )

    def _take_note(self, required: bool = False) -> None:
        """Note that the save has ended on this process: keep its error, or report it as saved."""
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
        following = "training goes on; the next save tries again"
        if number >= FORGIVEN and not save.optional:
            following = (
                "training stops and waits for the next save, and ends if it fails too "
                f"({number} saves in a row have failed)"
            )
        return (
            f"WARNING: the save of iteration {save.iteration} to {save.folder} failed: {_sentence(error)} Older "
            f"checkpoints are whole, and {following}. Until then, free space there, or mend the file "
            "system."
        )

    def _not_saved(self, save: Save) -> str:
        lost = "no checkpoint of this run is on the disk"
        if (newest := self._newest.get(save.folder)) is not None:
            lost = f"the steps since iteration {newest} are lost"
        return (
            f"Free space in {save.folder}, or mend its file system, and go on from the newest checkpoint there. The "
            f"newest state, of iteration {save.iteration}, is not on the disk: {lost}."
        )

    def abandon(self, patience: float) -> str | None:
        """Let this process's save end while it moves pieces, without the other processes: they may be gone.

        Args:
            patience: seconds without a moved piece after which the save is given up.

        Returns:
            A sentence that says which save is not on the disk; ``None``: there is no such save.
        """
        lost = None
        if (under_way := self.under_way) is not None and (save := self._begun) is not None:
            if not under_way.wait_while_moving(patience):
                lost = f"the save of iteration {save.iteration} to {save.folder} did not end"
            elif under_way.error is not None:
                lost = f"{_sentence(under_way.error)} {self._not_saved(save)}"
            else:
                self._take_note()
            under_way.end()
        self._begun = self.under_way = None
        return lost

    def abandon_at_exit(self) -> None:
        """Let a save under way end when a script ends without closing anything."""
        if (lost := self.abandon(STILL_SECONDS)) is not None:
            self._warn(f"WARNING: {lost}")


def _end_at_exit(saver: weakref.ref[Saver]) -> None:
    if (one := saver()) is not None:
        one.abandon_at_exit()


def _sentence(error: BaseException | None) -> str:
    """The message of a failed save, with its full stop."""
    text = "the save failed on another process, which says why" if error is None else str(error) or repr(error)
    return text if text.endswith((".", "!")) else f"{text}."
