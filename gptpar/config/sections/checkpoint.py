"""Flags of saving and resuming (folders, intervals, what is kept), and of restarts after a worker's death."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import NEVER, flag, on_unless

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
        False,
        "take the model and the tokenizer from the checkpoint at --load; a flag that contradicts them is refused",
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


def check_recovery(flags: Flags) -> Iterator[str]:
    """Whether there will be a whole state to go on from."""
    r, c = flags.recovery, flags.checkpoint
    asked = {"--max-restarts": r.max_restarts, "--mirror-interval": r.mirror_interval}
    for name, value in asked.items():
        if value and c.no_save_optim:
            yield (
                f"{name} {value} with --no-save-optim: a restart would find no optimizer state; leave one of them out."
            )
