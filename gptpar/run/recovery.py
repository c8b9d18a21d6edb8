"""Decides from which state restarted workers go on, and prints the times of the restart."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from gptpar.checkpoint import Manifest, checkpoints_in, first_usable, read_manifest
from gptpar.config import CheckpointConfig, Flags
from gptpar.config.flags import ParsedFlags
from gptpar.reporting.records import IterationRecord
from gptpar.reporting.sinks import Sink
from gptpar.system.restart import Restart, has_begun, memory_folder


def continued(parsed: ParsedFlags) -> ParsedFlags:
    """A worker's command line, changed after a restart.

    The first start loads what the user says. A later start goes on from the newest state that an earlier start left,
    with the same global batch on any number of processes.
    """
    manifest = newest_of_own(parsed.flags.checkpoint)
    if manifest is None:
        return parsed
    load = parsed.flags.checkpoint.save or str(memory_folder())
    anew = dict.fromkeys(("finetune", "reset_iteration", "no_load_lr_state", "no_load_optim"), False)
    flags = parsed.flags.update("checkpoint", load=load, ckpt_step=None, **anew)
    flags = with_global_batch(flags, manifest.meta["config"]["batch"]["global_batch_size"])
    return dataclasses.replace(parsed, flags=flags)


def with_global_batch(flags: Flags, size: int) -> Flags:
    """The flags with a global batch that does not follow from the number of processes."""
    return flags.update("batch", global_batch_size=size, gradient_accumulation_steps=None)


def newest_of_own(checkpoint: CheckpointConfig) -> Manifest | None:
    """The manifest of the newest state that earlier starts of these workers left.

    ``None`` in the first start, and after a death before anything was saved.
    """
    if not has_begun():
        return None
    folders = [Path(one) for one in (memory_folder(), checkpoint.save, checkpoint.save_local) if one]
    return first_usable((path for _, path in checkpoints_in(folders)), read_manifest)


class RecoveryTimes(Sink):
    """A sink that prints, after the first step of a restart, how long each part of the restart took.

    Args:
        restart: which one.
        say: prints a line.
    """

    name, keeps_records = "times of a restart", False

    def __init__(self, restart: Restart, say: Callable[[str], None]):
        self._say, self._restart, self._last = say, restart, time.monotonic()
        self._parts = {"noticed": restart.noticed_s, "ended": restart.ended_s, "started": self._last - restart.started}
        self._is_printed = restart.number == 0

    def mark(self, what: str) -> None:
        """Note that a part of the restart ends now."""
        now = time.monotonic()
        self._parts[what], self._last = now - self._last, now

    def iteration(self, record: IterationRecord) -> None:
        """Print the times after the first iteration, which ends the restart."""
        if self._is_printed:
            return
        self._is_printed = True
        self.mark("first step")
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts.items())
        number = str(self._restart.number) + (f" of {self._restart.limit}" if self._restart.limit else "")
        self._say(
            f" > restart {number} took {sum(self._parts.values()):.2f} s up to the end of iteration "
            f"{record.iteration} ({parts})"
        )
