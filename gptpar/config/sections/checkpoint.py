"""Flags of saving and resuming (folders, intervals, what is kept), and of restarts after a worker's death."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptpar.config.fields import NEVER, Notes, flag, on_unless

if TYPE_CHECKING:
    from gptpar.config import Flags


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run is saved and resumed from."""

    save: str | None = flag(
        None,
        "run folder: checkpoints, metrics.jsonl and TensorBoard files, of one run at a time",
        names=("--save-xser",),
    )
    load: str | None = flag(None, "folder to resume from (its newest whole checkpoint)")
    load_hf: str | None = flag(
        None,
        "Hugging Face folder to begin with: its model, weights and tokenizer (once --load holds a checkpoint, the run "
        "goes on from that)",
    )
    moe_use_upcycling: bool = flag(
        False, "with --load-hf: each of --num-experts begins as a copy of the dense model's MLP"
    )
    save_interval: int | None = flag(
        None,
        "steps between checkpoints; 0 is none (the last step is always saved)",
        names=("--persistent-save-interval",),
        least=0,
        most=NEVER,
    )
    save_interval_minutes: float | None = flag(
        None, "minutes between checkpoints, beside --save-interval or in its place", above=0
    )
    save_local: str | None = flag(
        None,
        "second folder, on a fast disk of this machine (or /dev/shm), which keeps the newest two checkpoints; resuming "
        "takes the newest whole one of both folders",
    )
    save_local_interval: int | None = flag(None, "steps between checkpoints in --save-local", least=1)
    save_local_interval_minutes: float | None = flag(None, "minutes between checkpoints in --save-local", above=0)
    save_hf_interval: int | None = flag(
        None, "steps between Hugging Face folders SAVE/hf/iter_..., a multiple of --save-interval", least=1
    )
    async_save: bool = on_unless(
        "--no-async-save", "do not train during a save: wait until the checkpoint is on the disk"
    )
    keep_checkpoints: int | None = flag(
        None, "keep only this many of this run's newest checkpoints", names=("--save-total-limit",), least=1
    )
    save_retain_interval: int | None = flag(
        None,
        "keep each checkpoint whose iteration is divisible by this; of the others, keep the newest only, or "
        "--keep-checkpoints of them",
        least=1,
    )
    no_save_optim: bool = flag(False, "save weights without the optimizer's moments")
    no_load_optim: bool = flag(False, "load weights without the optimizer's moments")
    finetune: bool = flag(False, "load weights only; start at iteration 0 with a fresh schedule and data order")
    reset_iteration: bool = flag(
        False,
        "load weights and moments, and start at iteration 0 with a fresh data order; the learning rate's schedule goes "
        "on where it was",
    )
    no_load_lr_state: bool = flag(False, "begin the learning rate's schedule anew, as this command line says it")
    ckpt_step: int | None = flag(
        None, "load this iteration instead of the newest; saving in that folder moves later ones to a branch", least=0
    )
    use_checkpoint_args: bool = flag(
        False, "take the model and the tokenizer from the checkpoint at --load; a flag that contradicts them is refused"
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop when --load holds no checkpoint instead of starting afresh")

    @property
    def num_kept(self) -> int | None:
        """Number of the newest checkpoints that are kept; ``None``: all."""
        return 1 if self.keep_checkpoints is None and self.save_retain_interval is not None else self.keep_checkpoints

    @property
    def begins_anew(self) -> bool:
        """Whether the run counts from 0 although it loads a checkpoint."""
        return self.finetune or self.reset_iteration


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run goes on by itself after a worker has died."""

    max_restarts: int = flag(
        0, "how many times the workers of this machine may be started again after a death", least=0, most=1_000_000
    )
    hang_seconds: float | None = flag(
        None,
        "seconds without a sign of life after which workers count as dead (default: 600 with --max-restarts)",
        above=0,
        most=1_000_000,
    )
    mirror_interval: int | None = flag(
        None,
        "with --max-restarts (several machines: of gptpar launch): steps between copies of the state in memory; each "
        "of several machines keeps its own files and its neighbour's",
        least=1,
    )


def check_checkpoint(flags: Flags) -> Iterator[str]:
    """When to save and where, what to load, and whether there will be a whole state to go on from."""
    c = flags.checkpoint
    yield from _saves(c)
    yield from _exports(c)
    yield from _folders(c)
    yield from _loads(c)
    asked = {"--max-restarts": flags.recovery.max_restarts, "--mirror-interval": flags.recovery.mirror_interval}
    for name, value in asked.items():
        if value and c.no_save_optim:
            yield (
                f"{name} {value} with --no-save-optim: a restart would find no optimizer state; leave one of them out."
            )


def _saves(c: CheckpointConfig) -> Iterator[str]:
    """When to save, and where."""
    for name in ("--save-interval-minutes", "--save-local"):  # --save-interval is Megatron's, which ignores it
        if getattr(c, name[2:].replace("-", "_")) is not None and not c.save:
            yield f"{name} is given but --save is not: say where to save."
    intervals = c.save_local_interval, c.save_local_interval_minutes
    if c.save_local is None and any(interval is not None for interval in intervals):
        yield "--save-local-interval or -minutes is given but --save-local is not: say where to save."
    elif c.save_local is not None and all(interval is None for interval in intervals):
        yield f"--save-local {c.save_local} is never used: give --save-local-interval or --save-local-interval-minutes."
    elif c.save_local is not None and c.save and Path(c.save_local).resolve() == Path(c.save).resolve():
        yield f"--save-local {c.save_local} is --save itself: choose another folder, on a disk of this machine."


def _folders(c: CheckpointConfig) -> Iterator[str]:
    if c.load and not Path(c.load).exists() and c.load != c.save:
        yield f"--load {c.load}: there is no such folder."
    for name, folder in (("--save", c.save), ("--save-local", c.save_local)):
        if folder and Path(folder).exists() and not Path(folder).is_dir():
            yield f"{name} {folder} is a file; a folder is needed."


def _loads(c: CheckpointConfig) -> Iterator[str]:
    if c.finetune and c.reset_iteration:
        yield "--finetune and --reset-iteration exclude each other: only the second keeps the optimizer's moments."
    if (c.ckpt_step is not None or c.begins_anew or c.no_load_lr_state) and not c.load:
        yield (
            "--ckpt-step, --finetune, --reset-iteration and --no-load-lr-state need --load, the folder to load from."
        )
    if c.moe_use_upcycling and c.load_hf is None:
        yield "--moe-use-upcycling needs a dense model: give its folder, --load-hf, or drop it."


def _exports(c: CheckpointConfig) -> Iterator[str]:
    """Check what is exported to Hugging Face."""
    if c.save_hf_interval is not None and (not c.save or c.save_interval is None):
        yield f"--save-hf-interval {c.save_hf_interval} exports checkpoints: give --save and --save-interval."
    elif c.save_hf_interval is not None and c.save_interval and c.save_hf_interval % c.save_interval:
        yield (
            f"--save-hf-interval {c.save_hf_interval} is no multiple of --save-interval {c.save_interval}: only a "
            "checkpoint can be exported."
        )


def derive_saves(notes: Notes) -> None:
    """Say that nothing is saved, or where curves go beside the checkpoints."""
    notes.drop_zero("checkpoint", "save_interval")
    c = notes.flags.checkpoint
    if c.save_interval is not None and not c.save:
        notes.add("save interval", "none", "--save is not given: nothing is saved")
    if c.save:
        notes.fill("logging", "tensorboard_dir", f"{c.save}/tensorboard", "inside --save")
