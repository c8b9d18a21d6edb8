"""Decides when and to which folders a run saves, and how many local saves stay; follows the save under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import room, save_checkpoint
from gptpar.checkpoint.folders import files_of
from gptpar.checkpoint.ring import Ring
from gptpar.checkpoint.save_request import Late, Save, Saved
from gptpar.checkpoint.saver import Saver
from gptpar.config import CheckpointConfig
from gptpar.engine.ranges import Home
from gptpar.exchange import Exports
from gptpar.reporting.banner import format_bytes
from gptpar.run.accept import Inputs
from gptpar.run.progress import Progress
from gptpar.run.saved_state import kinds_to_save, meta_of, tensors_to_save
from gptpar.run.trainer import Trainer
from gptpar.topology.tensor_parts import tensors_of

KEPT_LOCALLY = 2
"""Checkpoints in ``--save-local``: the newest, and the one before it in case that is damaged."""

EXPORT_POLL_SECONDS = 0.5

Permit = Callable[[], None]


@dataclass
class Target:
    """A folder that a run saves to.

    Attributes:
        interval: steps between checkpoints; ``None``: steps make no save due.
        minutes: minutes between checkpoints; ``None``: the clock makes no save due.
        keep, retain: see ``save_checkpoint``.
        permit: see ``save_checkpoint``.
        ring: the machines, each of which has a folder of its own at this path; ``None``: all share the folder.
        saved_at: the last iteration that was saved here, or is being saved.
        in_memory: whether its files are in the host's memory; such saves are not reported.
        is_late: whether the processes agreed that its minutes are over.
    """

    folder: Path
    interval: int | None
    minutes: float | None
    keep: int | None
    retain: int | None = None
    permit: Permit | None = None
    in_memory: bool = False
    ring: Ring | None = None
    saved_at: int | None = None
    is_late: bool = False
    _since: float = field(default_factory=time.monotonic)

    @property
    def files_in_memory(self) -> int:
        """During a save, how many processes' files each process adds to its host's memory: its own, a neighbour's."""
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
    shared = Target(
        Path(config.save),
        config.save_interval,
        config.save_interval_minutes,
        config.num_kept,
        config.save_retain_interval,
    )
    if config.save_local is None:
        return [shared]
    local = config.save_local_interval, config.save_local_interval_minutes
    return [shared, Target(Path(config.save_local), *local, KEPT_LOCALLY)]


class Saving:
    """Saves a run's state while training goes on; every process has one and calls the same methods in the same order.

    One save is under way at a time. A failed save is reported, and the next one tries again (:class:`Saver`).

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
        inputs: Inputs,
        say: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
        permits: Sequence[Permit | None] = (),
    ):
        self._trainer, self._inputs, self._say, self._flush = trainer, inputs, say, flush
        self._config = trainer.config.checkpoint
        self.targets = targets_of(self._config)
        for target, permit in zip(self.targets, permits, strict=False):
            target.permit = permit
        interval = self._config.save_hf_interval if trainer.topology.is_main else None
        self._exports = None if interval is None else Exports(interval, say)
        activity, guard = trainer.activity, trainer.engine.optimizer.guard
        self._saver = Saver(trainer.topology, guard, say, self._take_note, alive=lambda: activity.note(activity.doing))
        self._target: Target | None = None  # where the last save went

    def describe(self) -> str:
        """The line about saves at the start of a run."""
        if not self._config.async_save:
            return "saving: training stands still meanwhile (--no-async-save)"
        place = "the GPU or the host" if torch.cuda.is_available() else "the host"
        state = sum(part.nbytes for part in tensors_of(tensors_to_save(self._trainer).values()))
        return (
            "saving: training goes on while a checkpoint is written; state that a step is about to overwrite is copied "
            f"first if {place} has memory for the copy ({format_bytes(room.host_room())} are free on the host), else "
            f"the step waits; the host's memory for copies, at most {format_bytes(state)} a process, is kept from save "
            "to save until the machine is short of memory"
        )

    def prepare(self) -> None:
        """Get memory for copies ready while the first steps run."""
        if self._config.async_save:
            self._saver.prepare(tensors_to_save(self._trainer).values())

    def votes(self) -> list[bool]:
        """Whether each target's minutes are over by the main process's clock."""
        is_main = self._trainer.topology.is_main
        return [is_main and target.minutes_are_over() for target in self.targets]

    def take_votes(self, votes: Sequence[bool]) -> None:
        """Take the votes of all processes."""
        for target, vote in zip(self.targets, votes, strict=False):
            target.is_late |= vote

    def is_due(self, iteration: int) -> bool:
        """Whether a step is followed by a save."""
        return any(target.is_due(iteration) for target in self.targets)

    @property
    def has_saved(self) -> bool:
        """Whether this run has saved to ``--save``."""
        return any(target.saved_at is not None for target in self.targets[:1])

    def save_what_is_due(self, progress: Progress, *, keep_all: bool) -> None:
        """If several folders are due, save to the first only (``--save`` before ``--save-local``)."""
        due = [target for target in self.targets if target.is_due(progress.iteration)]
        if due:
            self.begin(due[0], progress, keep_all=keep_all)
        for target in due[1:]:
            target.begin(progress.iteration)

    def save_last(self, progress: Progress, *, keep_all: bool) -> None:
        """Save the current state to ``--save`` and wait for it. Do nothing if this iteration is already saved there.

        Raises:
            CheckpointError: it is not on the disk.
        """
        self.finish()  # it may have been a save of this moment, and have failed
        if self.targets and self.targets[0].saved_at != progress.iteration:
            self.begin(self.targets[0], progress, keep_all=keep_all, last=True)

    def begin(self, target: Target, progress: Progress, *, keep_all: bool, last: bool = False) -> None:
        """Save the present state, while training goes on.

        Args:
            last: this is the run's last save: wait until it is on the disk.

        Raises:
            CheckpointError: saves keep failing, or the folder is another run's; see :class:`Saver`.
        """
        self.finish()
        since = time.perf_counter()
        if self.targets and target is self.targets[0]:
            self._wait_for_export()  # of a checkpoint that this save may delete
        iteration, trainer = progress.iteration, self._trainer
        target.begin(iteration)
        self._target = target
        trainer.activity.note(f"saving the checkpoint of iteration {iteration}")
        if not target.in_memory:
            self._say(f"saving checkpoint at iteration {iteration:7d} to {target.folder}")
        tensors = tensors_to_save(trainer, Home.DEVICE)
        meta = meta_of(trainer, progress, self._inputs)
        permit = target.permit or (lambda: None)
        keeping: dict[str, Any] = {
            "keep": None if keep_all else target.keep,
            "retain": target.retain,
            "permit": permit,
            "ring": target.ring,
            "tokenizer_files": self._inputs.tokenizer_files,
        }
        write = partial(save_checkpoint, target.folder, iteration, meta=meta, **keeping)
        host = trainer.host
        save = Save(
            target.folder,
            iteration,
            tensors,
            write,
            permit,
            files_in_memory=target.files_in_memory,
            optional=target.in_memory,
            late=None if host is None else self._late,
            late_bytes=0 if host is None else sum(host.bytes_of(kind) for kind in kinds_to_save(trainer)),
        )
        self._saver.begin(save, behind=self._config.async_save and not last, required=last, since=since)

    def _late(self) -> Late:
        views = self._trainer.engine.optimizer.host_views(kinds_to_save(self._trainer))
        blocks = [values for of_kind in views.values() for _, _, values in of_kind]
        return Late(blocks, partial(tensors_to_save, self._trainer, views))

    def poll(self) -> None:
        """Report a save that is over by now."""
        self._saver.poll()

    def finish(self, *, required: bool = False) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            CheckpointError: see :meth:`Saver.finish`.
        """
        self._saver.finish(required=required)
        if self._target is not None:  # a failed save does not count
            self._target.saved_at = self._saver.newest(self._target.folder)

    def _take_note(self, saved: Saved) -> None:
        """A checkpoint is on the disk."""
        assert self._target is not None
        if self._trainer.topology.is_main and not self._target.in_memory:
            self._report(saved)
        if self._exports is not None and self._target is self.targets[0]:
            self._exports.begin(saved.path, saved.save.iteration)
        self._flush()

    def close(self) -> None:
        """Wait for the save under way, and for its export.

        Raises:
            CheckpointError: see :meth:`Saver.finish`.
        """
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise
        self._wait_for_export()

    def abandon(self) -> None:
        """Close after an error, when other processes may be gone: errors of the save and its export are ignored."""
        with suppress(Exception):
            patience = 60 * self._trainer.config.parallel.distributed_timeout_minutes
            if (lost := self._saver.abandon(patience)) is not None:
                self._say(f"WARNING: {lost}")
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

    def _report(self, saved: Saved) -> None:
        iteration, path = saved.save.iteration, saved.path
        num_bytes = sum(file.stat().st_size for file in files_of(path))
        kept = saved.most_kept
        copies = "; cloned on the GPU" if saved.cloned else f"; {format_bytes(kept)} of memory for it" if kept else ""
        self._say(
            f"  successfully saved checkpoint at iteration {iteration:7d} to {saved.save.folder} "
            f"({num_bytes / 1e9:.3g} GB; training stood {saved.stood_s:.2f} s, written in {saved.written_s:.2f} s, "
            f"{num_bytes / 1e9 / max(saved.written_s, 1e-9):.2f} GB/s{copies})"
        )


@contextmanager
def open_saving(
    trainer: Trainer,
    inputs: Inputs,
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
        saving.prepare()
    try:
        yield saving
    except BaseException:
        saving.abandon()  # the first error is the cause
        raise
    saving.close()
