"""Where a run is saved and resumed from."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run is saved and resumed from."""

    save: str | None = flag(None, "run folder: checkpoints, metrics.jsonl and TensorBoard files, of one run at a time")
    load: str | None = flag(None, "folder to resume from (its newest good checkpoint)")
    save_interval: int | None = flag(None, "steps between checkpoints (the last step is always saved)", least=1)
    keep_checkpoints: int | None = flag(None, "keep only this many of this run's newest checkpoints", least=1)
    no_save_optim: bool = flag(False, "save weights without the optimizer's moments")
    no_load_optim: bool = flag(False, "load weights without the optimizer's moments")
    finetune: bool = flag(False, "load weights only; start at iteration 0 with a fresh schedule and data order")
    ckpt_step: int | None = flag(
        None, "load this iteration instead of the newest; saving in that folder moves later ones to a branch", least=0
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop when --load holds no checkpoint instead of starting afresh")
