"""The times and folders of a run's saves, and the save that is under way while the run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from gptpar.checkpoint import save_checkpoint
from gptpar.checkpoint.background import SaveUnderWay
from gptpar.checkpoint.ring import Ring
from gptpar.checkpoint.save import snapshot_of
from gptpar.config import CheckpointConfig
from gptpar.reporting.banner import format_bytes
from gptpar.system.host import available_memory, place_on_machine
from gptpar.system.regions import sizes_of_copies
from gptpar.system.snapshot import Snapshot
from gptpar.system.spare_memory import SpareMemory
from gptpar.topology.tensor_parts import TensorParts
from gptpar.training import resume
from gptpar.training.exchange.exports import Exports
from gptpar.training.progress import Progress
from gptpar.training.trainer import Trainer

KEPT_LOCALLY = 2
"""Checkpoints in ``--save-local``: the newest, and the one before it in case that is damaged."""

HOST_RESERVE = 2 << 30
DEVICE_RESERVE = 2 << 30
"""Bytes that copies leave free: training may still need some."""

EXPORT_POLL_SECONDS = 0.5

Permit = Callable[[], None]


@dataclass
class Target:
    """A folder that a run saves to.

    Attributes:
        interval: steps between checkpoints; ``None``: none.
        minutes: between checkpoints; ``None``: none.
        keep: see ``save_checkpoint``.
        permit: see ``save_checkpoint``.
        ring: of the machines, where each has this folder for itself.
        saved_at: the last iteration that was saved here.
        in_memory: its files take the host's memory, and its saves are not told.
        is_late: whether the processes agreed that its minutes are over.
    """

    folder: Path
    interval: int | None
    minutes: float | None
    keep: int | None
    permit: Permit | None = None
    in_memory: bool = False
    ring: Ring | None = None
    saved_at: int | None = None
    is_late: bool = False
    _since: float = field(default_factory=time.monotonic)

    @property
    def files_in_memory(self) -> int:
        """How many processes' files a save brings into the host's memory, for each process: its own, a neighbour's."""
        return self.in_memory + (self.ring is not None and not self.ring.is_alone)

    def minutes_are_over(self) -> bool:
        """Whether a save is due by this process's clock."""
        return self.minutes is not None and time.monotonic() - self._since >= 60 * self.minutes

    def is_due(self, iteration: int) -> bool:
        """Whether a step is followed by a save; the same on all processes."""
        by_steps = self.interval is not None and iteration % self.interval == 0
        return (self.is_late or by_steps) and self.saved_at != iteration

    def begin(self, iteration: int) -> None:
        """A save to this folder begins."""
        self.saved_at, self.is_late, self._since = iteration, False, time.monotonic()


def targets_of(config: CheckpointConfig) -> list[Target]:
    """The folders of a configuration, the one that all machines share first."""
    if config.save is None:
        return []
    shared = Target(Path(config.save), config.save_interval, config.save_interval_minutes, config.keep_checkpoints)
    if config.save_local is None:
        return [shared]
    local = config.save_local_interval, config.save_local_interval_minutes
    return [shared, Target(Path(config.save_local), *local, KEPT_LOCALLY)]


class Saving:
    """Saves a run's state while training goes on; every process has one and calls the same methods in the same order.

    One save is under way at a time. Its collectives have a process group of their own.

    Args:
        trainer, inputs: what is saved.
        say: prints a line, on the main process.
        flush: is called when a checkpoint is on the disk.
        permits: for each target, see ``save_checkpoint``.

    Attributes:
        targets: see :func:`targets_of`.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: resume.Inputs,
        say: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
        permits: Sequence[Permit | None] = (),
    ):
        self._trainer, self._inputs, self._say, self._flush = trainer, inputs, say, flush
        self._config, self._guard = trainer.config.checkpoint, trainer.engine.optimizer.guard
        self.targets = targets_of(self._config)
        for target, permit in zip(self.targets, permits, strict=False):
            target.permit = permit
        self._group: dist.ProcessGroup | None = None
        mirrors = trainer.config.recovery.mirror_interval is not None
        if (self.targets or mirrors) and trainer.topology.layout.world_size > 1:
            timeout = timedelta(minutes=trainer.config.parallel.distributed_timeout_minutes)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        interval = self._config.save_hf_interval if trainer.topology.is_main else None
        self._exports = None if interval is None else Exports(interval, say)
        self._save: SaveUnderWay | None = None
        self._target: Target | None = None
        self._stalled_s, self._cloned = 0.0, False
        self._most_used, self._most_cloned = 0, 0  # bytes of the GPU's memory
        self._spare = SpareMemory()

    def prepare(self) -> None:
        """Get memory for the copies of the host's state ready while the first steps run, if there is plenty of it."""
        if not self.targets or not self._config.async_save:
            return
        tensors = resume.tensors_to_save(self._trainer).values()
        on_host = (part for tensor in tensors for _, part in tensor.parts if not part.is_cuda)
        sizes = list(sizes_of_copies(on_host, self._guard.exchanged()))
        if sum(sizes) <= host_room() // 2:
            self._spare.limit_to(sum(sizes))
            self._spare.prepare(sizes)

    def describe(self) -> str:
        """The line about saves at the start of a run."""
        if not self._config.async_save:
            return "saving: training stands still meanwhile (--no-async-save)"
        place = "copied where the GPU or the host" if torch.cuda.is_available() else "copied where the host"
        return (
            f"saving: behind the training; what a step overwrites meanwhile is {place} has memory "
            f"({format_bytes(host_room())} of the host's now), else waited for"
        )

    def votes(self) -> list[bool]:
        """For each target, whether its minutes are over by the main process's clock."""
        is_main = self._trainer.topology.is_main
        return [is_main and target.minutes_are_over() for target in self.targets]

    def hear(self, votes: Sequence[bool]) -> None:
        """Take the votes of all processes."""
        for target, vote in zip(self.targets, votes, strict=False):
            target.is_late |= vote

    def is_due(self, iteration: int) -> bool:
        """Whether a step is followed by a save."""
        return any(target.is_due(iteration) for target in self.targets)

    @property
    def has_saved(self) -> bool:
        """Whether anything was saved to ``--save``."""
        return any(target.saved_at is not None for target in self.targets[:1])

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed on this process; all are to come and :meth:`finish` it."""
        return self._save is not None and self._save.failed

    def save_what_is_due(self, progress: Progress, *, keep_all: bool) -> None:
        """Begin to save to a folder that is due. One folder is enough, and ``--save`` comes first."""
        due = [target for target in self.targets if target.is_due(progress.iteration)]
        if due:
            self.begin(due[0], progress, keep_all=keep_all)
        for target in due[1:]:
            target.begin(progress.iteration)

    def save_last(self, progress: Progress, *, keep_all: bool) -> None:
        """Save this moment where all machines see it, unless it is there already, and wait for it."""
        if self.targets and self.targets[0].saved_at != progress.iteration:
            self.begin(self.targets[0], progress, keep_all=keep_all, behind=False)
        self.finish()

    def begin(self, target: Target, progress: Progress, *, keep_all: bool, behind: bool = True) -> None:
        """Take the state as it stands, and write it behind the training.

        Raises:
            CheckpointError: the save before failed; see ``save_checkpoint``.
        """
        started = time.perf_counter()
        self.finish()
        if self.targets and target is self.targets[0]:
            self._wait_for_export()  # of a checkpoint that this save may delete
        iteration, trainer, behind = progress.iteration, self._trainer, behind and self._config.async_save
        target.begin(iteration)
        trainer.activity.note(f"saving the checkpoint of iteration {iteration}")
        if not target.in_memory:
            self._say(f"saving checkpoint at iteration {iteration:7d} to {target.folder}")
        tensors = resume.tensors_to_save(trainer)
        meta = resume.meta_of(trainer, progress, self._inputs)
        snapshot, self._cloned = self._snapshot(tensors, behind, target.files_in_memory)

        def write() -> Path:
            keep = None if keep_all else target.keep
            return save_checkpoint(
                *(target.folder, iteration, tensors, meta),
                process_group=self._group,
                keep=keep,
                permit=target.permit,
                snapshot=snapshot,
                ring=target.ring,
            )

        self._target, self._save = target, SaveUnderWay(iteration, snapshot, write, self._guard, behind=behind)
        self._stalled_s = time.perf_counter() - started

    def _snapshot(self, tensors: dict[str, TensorParts], behind: bool, files_in_memory: int) -> tuple[Snapshot, bool]:
        """The state as it stands, and whether a GPU's part of it was cloned there."""
        if not behind:
            return snapshot_of(tensors), False
        room = host_room(self._spare.num_bytes)
        if files_in_memory:  # what is written takes host memory, too
            written = sum(part.nbytes for tensor in tensors.values() for _, part in tensor.parts)
            room = max(0, room - files_in_memory * written)
        self._spare.limit_to(room)
        on_gpu = [part for tensor in tensors.values() for _, part in tensor.parts if part.is_cuda]
        clones = bool(on_gpu) and self._may_clone(on_gpu[0].device, sum(part.nbytes for part in on_gpu))
        make = partial(snapshot_of, tensors, room, spare=self._spare, exchanged=list(self._guard.exchanged()))
        try:
            return make(clones=clones), clones
        except torch.OutOfMemoryError:  # free memory in pieces that are too small
            return make(), False

    def _may_clone(self, device: torch.device, num_bytes: int) -> bool:
        """Whether a GPU has room for so many bytes of copies beside the training."""
        used = torch.cuda.max_memory_allocated(device) - self._most_cloned  # earlier copies may have been part of it
        self._most_used = max(self._most_used, used)
        if num_bytes > device_room(device, self._most_used):
            return False
        self._most_cloned = max(self._most_cloned, num_bytes)
        return True

    def poll(self) -> None:
        """Tell of a save that is on the disk by now."""
        if self._save is not None and self._save.over and not self._save.failed:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            CheckpointError: it failed; the older checkpoints are whole.
        """
        save, self._save = self._save, None
        if save is None:
            return
        started, over = time.perf_counter(), save.over
        path = save.finish()
        self._stalled_s += 0.0 if over else time.perf_counter() - started
        if self._trainer.topology.is_main:
            self._tell(save, path)
        if self._exports is not None and self._target is self.targets[0]:
            self._exports.begin(path, save.iteration)
        self._flush()

    def close(self) -> None:
        """Wait for the save under way, and for its export.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise
        self._wait_for_export()

    def abandon(self) -> None:
        """The same after an error, when other processes may be gone: errors of the save and its export are ignored."""
        with suppress(Exception):
            self.finish()
        if self._exports is not None:
            self._exports.finish()

    def _wait_for_export(self) -> None:
        """Wait on all processes for the main process's export; each collective on the way takes only a moment."""
        if self._config.save_hf_interval is None:
            return
        while self._trainer.topology.any_rank(self._exports is not None and self._exports.is_under_way):
            time.sleep(EXPORT_POLL_SECONDS)
        if self._exports is not None:
            self._exports.finish()

    def _tell(self, save: SaveUnderWay, path: Path) -> None:
        assert self._target is not None
        if self._target.in_memory:
            return
        num_bytes = sum(entry.stat().st_size for entry in path.iterdir()) if path.exists() else 0
        kept = save.snapshot.most_kept
        copies = "; cloned on the GPU" if self._cloned else f"; {format_bytes(kept)} of memory for it" if kept else ""
        self._say(
            f"  successfully saved checkpoint at iteration {save.iteration:7d} to {self._target.folder} "
            f"({num_bytes / 1e9:.3g} GB; training stood {self._stalled_s + save.snapshot.waited_s:.2f} s, written in "
            f"{save.seconds:.2f} s, {num_bytes / 1e9 / max(save.seconds, 1e-9):.2f} GB/s{copies})"
        )


@contextmanager
def open_saving(
    trainer: Trainer,
    inputs: resume.Inputs,
    say: Callable[[str], None],
    flush: Callable[[], None],
    permits: Sequence[Permit | None],
) -> Iterator[Saving]:
    """A run's saving; the save under way is finished before the block ends, by an error or without.

    Raises:
        CheckpointError: that save failed. If another error ends the block, that error is raised.
    """
    saving = Saving(trainer, inputs, say, flush, permits)
    if saving.targets and not trainer.config.logging.skip_train:
        say(saving.describe())
    try:
        yield saving
    except BaseException:
        saving.abandon()  # the first error is the cause
        raise
    saving.close()


def host_room(held: int = 0) -> int:
    """Bytes of host memory that this process may fill with copies, with what it holds for them already."""
    return max(0, (available_memory() - HOST_RESERVE) // place_on_machine()[1] + held)


def device_room(device: torch.device, most_used: int) -> int:
    """Bytes of a GPU's memory that may be filled with copies.

    Args:
        most_used: bytes that the training used at most: between two steps less, but the next one needs them again.
    """
    unused = torch.cuda.memory_reserved(device) - most_used
    return max(0, torch.cuda.mem_get_info(device)[0] + unused - DEVICE_RESERVE)
