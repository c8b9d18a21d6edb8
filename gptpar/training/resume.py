"""What a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import (
    DamagedCheckpoint,
    Manifest,
    find_checkpoints,
    load_checkpoint,
    load_meta,
    read_manifest,
    save_checkpoint,
)
from gptpar.config import Config
from gptpar.errors import CheckpointError, ConfigError
from gptpar.optim.schedule import Schedule
from gptpar.tensor_parts import TensorParts
from gptpar.training.data import data_order, require_same_order
from gptpar.training.progress import Progress
from gptpar.training.trainer import Trainer

RNG_RULE = "dropout is seeded by (seed, iteration, place of the micro-batch in the global batch)"


def save(trainer: Trainer, progress: Progress, tokenizer: dict[str, Any]) -> Path:
    """Write a checkpoint of this moment into the run folder; every process calls it.

    Args:
        tokenizer: the tokenizer's identity, kept so that a checkpoint is never continued with another vocabulary.
    """
    checkpoint = trainer.config.checkpoint
    assert checkpoint.save is not None
    meta = {
        "progress": dataclasses.asdict(progress),
        "optimizer_steps": trainer.model.optimizer.steps_taken,
        "loss_scale": trainer.loss_scale.state(),
        "schedule": dataclasses.asdict(trainer.schedule),
        "rng": {"seed": trainer.config.data.seed, "rule": RNG_RULE},
        "tokenizer": tokenizer,
        "data_order": data_order(trainer.config, trainer.topology.layout.data),
        "config": trainer.config.to_dict(),
        "torch": torch.__version__,
    }
    tensors = checkpoint_tensors(trainer, with_moments=not checkpoint.no_save_optim)
    return save_checkpoint(checkpoint.save, progress.iteration, tensors, meta, keep=checkpoint.keep_checkpoints)


def checkpoint_tensors(trainer: Trainer, *, with_moments: bool) -> dict[str, TensorParts]:
    """Views of the live state by global name: ``weights/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME``."""
    return {
        f"{kind}/{name}": tensor
        for kind, views in trainer.model.optimizer.state_tensors().items()
        for name, tensor in views.items()
        if with_moments or kind == "weights"
    }


def refuse_foreign_save_folder(config: Config) -> None:
    """Saving into a folder that holds another run's checkpoints would fail hours later; say so now.

    Raises:
        ConfigError: ``--save`` holds checkpoints and the run does not continue from them.
    """
    c = config.checkpoint
    if c.save is None or (c.load is not None and Path(c.load).resolve() == Path(c.save).resolve()):
        return
    found = find_checkpoints(Path(c.save)) if Path(c.save).is_dir() else []
    if found:
        raise ConfigError(
            [
                f"--save {c.save} already holds checkpoints (newest: iteration {found[0][0]}): add --load {c.save} to "
                "go on from there, or choose another folder."
            ]
        )


def checkpoint_to_resume(config: Config) -> Manifest | None:
    """What the checkpoint that ``--load`` (and ``--ckpt-step``) mean says of itself; ``None`` for a fresh start.

    Raises:
        CheckpointError: there is none although one is required, or none whose manifest can be read.
    """
    c = config.checkpoint
    if c.load is None:
        return None
    found = find_checkpoints(Path(c.load)) if Path(c.load).is_dir() else []
    required = c.exit_on_missing_checkpoint or c.finetune or config.logging.skip_train or c.ckpt_step is not None
    if not found and not required:
        return None
    for number, path in found:
        if c.ckpt_step in (None, number):
            with contextlib.suppress(DamagedCheckpoint):  # load_checkpoint will name it, and take an older one
                return read_manifest(path)
    wanted = "checkpoint" if c.ckpt_step is None else f"checkpoint of iteration {c.ckpt_step}"
    raise CheckpointError(f"there is no readable {wanted} in --load {c.load}")


def progress_to_resume(config: Config) -> Progress:
    """Where the run will go on, known before anything is built."""
    manifest = checkpoint_to_resume(config)
    return Progress() if manifest is None or config.checkpoint.finetune else Progress(**manifest.meta["progress"])


def load(trainer: Trainer, tokenizer: dict[str, Any], say: Callable[[str], None]) -> Progress:
    """Fill the trainer from ``--load``, or with initial weights if there is no checkpoint; return where the run stands.

    Raises:
        CheckpointError: no checkpoint although one is required, or one that does not fit this run.
    """
    c = trainer.config.checkpoint
    manifest = checkpoint_to_resume(trainer.config)
    if manifest is None or c.load is None:
        if c.load is not None:
            say(f" > no checkpoint in {c.load} yet: starting from the beginning")
        trainer.initialise()
        return Progress()
    weights_only = c.finetune or c.no_load_optim
    _require_fit(trainer, manifest, tokenizer, weights_only=weights_only)
    targets = checkpoint_tensors(trainer, with_moments=not weights_only)
    loaded = load_checkpoint(c.load, targets, iteration=c.ckpt_step, strict=not weights_only, report=_only_missing(say))
    trainer.model.publish()
    say(f" > loaded {loaded.path} (iteration {loaded.iteration})")
    if c.finetune:
        return Progress()
    trainer.schedule = _agree_on_schedule(trainer, loaded.meta["schedule"])
    if not weights_only:
        trainer.model.optimizer.steps_taken = loaded.meta["optimizer_steps"]
    trainer.loss_scale.load(loaded.meta["loss_scale"])
    return Progress(**loaded.meta["progress"])


def _require_fit(trainer: Trainer, manifest: Manifest, tokenizer: dict[str, Any], *, weights_only: bool) -> None:
    """What can be known before the tensors are read: tokenizer, schedule, and that what is wanted was saved."""
    c, stored = trainer.config.checkpoint, manifest.tensors.keys()
    if not c.finetune:
        _require_same_tokenizer(manifest.meta["tokenizer"], tokenizer)
        _agree_on_schedule(trainer, manifest.meta["schedule"])
        if not trainer.config.logging.skip_train:
            require_same_order(manifest.meta, trainer.config, trainer.topology.layout.data)
    if not weights_only and not any(name.startswith("exp_avg/") for name in stored):
        raise CheckpointError(
            f"the checkpoint in {c.load} was saved without the optimizer's moments: add --no-load-optim"
        )
    if weights_only and (missing := checkpoint_tensors(trainer, with_moments=False).keys() - stored):
        raise CheckpointError(
            f"the checkpoint in {c.load} lacks {len(missing)} weights of this model, such as {min(missing)!r}"
        )


def _only_missing(say: Callable[[str], None]) -> Callable[[str], None]:
    """Leaves out the reports of moments that were not asked for."""
    return lambda sentence: None if "nothing asks for it" in sentence else say(f" > {sentence}")


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    keys = [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]
    return "; ".join(f"{key} {saved.get(key)} there, {here.get(key)} here" for key in keys)


def _require_same_tokenizer(saved: dict[str, Any], here: dict[str, Any]) -> None:
    if differ := _differences(saved, here):
        raise CheckpointError(
            f"the checkpoint was trained with another tokenizer ({differ}): use the same one, or --finetune."
        )


def _agree_on_schedule(trainer: Trainer, saved: dict[str, Any]) -> Schedule:
    """This command line's schedule if it equals the checkpoint's, else what the user said is to win."""
    here = dataclasses.asdict(trainer.schedule)
    o = trainer.config.optimizer
    if o.use_checkpoint_opt_param_scheduler:
        return Schedule(**saved)
    differ = "" if trainer.config.logging.skip_train else _differences(saved, here)
    if differ and not o.override_opt_param_scheduler:
        raise CheckpointError(
            f"the schedule differs from the checkpoint's ({differ}; lengths in samples or tokens): add "
            "--override-opt-param-scheduler to take this command line's, or --use-checkpoint-opt-param-scheduler."
        )
    return trainer.schedule


def saved_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and the whole meta of a checkpoint or of a folder's newest one."""
    meta = load_meta(path)
    return Config.from_dict(meta["config"]), meta
