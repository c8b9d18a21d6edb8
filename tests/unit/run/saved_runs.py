"""Checkpoints of the tiny run, and whether another run may go on from them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gptpar.checkpoint import save_checkpoint
from gptpar.config import Config
from gptpar.run import saved_state
from gptpar.run.progress import Progress
from gptpar.run.resume import Inputs
from gptpar.run.trainer import Trainer
from tests.helpers import make_trainer, tiny_config

TOKENIZER = {"type": "none", "vocab_size": 60}
DONE = Progress(iteration=7, consumed_samples=14, scheduled_samples=14)


def inputs_of(config: Config, tokenizer: dict[str, Any] = TOKENIZER) -> Inputs:
    return Inputs.of(config, tokenizer)


@cache
def initial(flags: str) -> Trainer:
    """Nobody trains it."""
    return make_trainer(tiny_config(flags))


def saved(folder: Path, flags: str = "", change: Callable[[dict[str, Any]], object] = lambda meta: None) -> Path:
    """A run's checkpoint of iteration 7, its meta edited."""
    trainer = initial(flags)
    meta = json.loads(json.dumps(saved_state.meta_of(trainer, DONE, inputs_of(trainer.config))))
    change(meta)
    return save_checkpoint(folder, 7, saved_state.checkpoint_tensors(trainer), meta)


def save(
    trainer: Trainer, progress: Progress, inputs: Inputs, *, keep: int | None, permit: Callable[[], None] | None = None
) -> Path:
    """Write a checkpoint of this moment into the run folder; every process calls it."""
    checkpoint = trainer.config.checkpoint
    assert checkpoint.save is not None
    tensors, meta = saved_state.tensors_to_save(trainer), saved_state.meta_of(trainer, progress, inputs)
    how: dict[str, Any] = {"keep": keep, "permit": permit, "tokenizer_files": inputs.tokenizer_files}
    return save_checkpoint(checkpoint.save, progress.iteration, tensors, meta, **how)


def with_fields(config: Config, values: dict[str, Any]) -> Config:
    for name, value in values.items():
        section, field = name.split(".")
        config = config.update(section, **{field: value})
    return config
