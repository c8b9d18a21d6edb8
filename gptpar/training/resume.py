"""What a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import (
    DamagedCheckpoint,
    Manifest,
    find_checkpoints,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from gptpar.checkpoint.folders import checkpoint_path
from gptpar.checkpoint.foreign import why_not_to_load, why_not_to_save
from gptpar.config import Config
from gptpar.errors import CheckpointError, ConfigError
from gptpar.optim.schedule import Schedule, make_schedule
from gptpar.tensor_parts import TensorParts
from gptpar.training import same_run
from gptpar.training.batch_plan import BatchPlan
from gptpar.training.progress import Progress
from gptpar.training.same_run import Corpora, Rule
from gptpar.training.stored import StoredRun, stored_config, stored_run
from gptpar.training.trainer import Trainer

RNG_RULE = "dropout is seeded by (seed, iteration, place of the micro-batch in the global batch)"


@dataclass(frozen=True)
class Inputs:
    """Where a run's tokens come from, kept so that a checkpoint is not continued with others unnoticed.

    Attributes:
        tokenizer: the tokenizer's identity.
        corpora: the corpora's identities when the run began, by the field that names them.
    """

    tokenizer: dict[str, Any]
    corpora: Corpora

    @staticmethod
    def of(config: Config, tokenizer: dict[str, Any]) -> Inputs:
        """Reads a little of each corpus."""
        return Inputs(tokenizer, same_run.corpora_of(config.data))


def save(trainer: Trainer, progress: Progress, inputs: Inputs) -> Path:
    """Write a checkpoint of this moment into the run folder; every process calls it."""
    checkpoint = trainer.config.checkpoint
    assert checkpoint.save is not None
    tensors = checkpoint_tensors(trainer, with_moments=not checkpoint.no_save_optim)
    meta = meta_of(trainer, progress, inputs)
    return save_checkpoint(checkpoint.save, progress.iteration, tensors, meta, keep=checkpoint.keep_checkpoints)


def meta_of(trainer: Trainer, progress: Progress, inputs: Inputs) -> dict[str, Any]:
    """What a checkpoint says of its run beside the tensors; ``stored_run`` reads it."""
    return {
        "progress": dataclasses.asdict(progress),
        "optimizer_steps": trainer.model.optimizer.steps_taken,
        "loss_scale": trainer.loss_scale.state(),
        "schedule": dataclasses.asdict(trainer.schedule),
        "rng": {"seed": trainer.config.data.seed, "rule": RNG_RULE},
        "tokenizer": inputs.tokenizer,
        "corpora": inputs.corpora,
        "config": trainer.config.to_dict(),
        "torch": torch.__version__,
    }


def checkpoint_tensors(trainer: Trainer, *, with_moments: bool) -> dict[str, TensorParts]:
    """Views of the live state by global name: ``weights/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME``."""
    return {
        f"{kind}/{name}": tensor
        for kind, views in trainer.model.optimizer.state_tensors().items()
        for name, tensor in views.items()
        if with_moments or kind == "weights"
    }


def folder_problems(config: Config) -> Iterator[str]:
    """What ``--load`` and ``--save`` hold that is no checkpoint of ours; nothing may be written there."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load and (problem := why_not_to_load(load)):
        yield problem
    same = load and save and Path(load).resolve() == Path(save).resolve()
    if save and not same and (problem := why_not_to_save(save)):
        yield problem


def refuse_foreign_save_folder(config: Config) -> None:
    """Saving into a folder that holds another run's checkpoints would fail hours later; say so now.

    Raises:
        ConfigError: ``--save`` holds another program's checkpoint, or checkpoints from which the run does not continue.
    """
    c = config.checkpoint
    if c.save is not None and (problem := why_not_to_save(c.save)):
        raise ConfigError([problem])
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
    if problem := why_not_to_load(c.load):
        raise CheckpointError(problem)
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


def progress_to_resume(config: Config, inputs: Inputs) -> Progress:
    """Where the run will go on, known before anything is built.

    Raises:
        CheckpointError: the checkpoint is of another run; with all that differs.
    """
    manifest = checkpoint_to_resume(config)
    if manifest is None or config.checkpoint.finetune:
        return Progress()
    return _accepted(config, inputs, manifest).progress


def load(trainer: Trainer, inputs: Inputs, say: Callable[[str], None]) -> Progress:
    """Fill the trainer from ``--load``, or with initial weights if there is no checkpoint; return where the run stands.

    Raises:
        CheckpointError: no checkpoint although one is required, or one that does not fit this run.
    """
    config, c = trainer.config, trainer.config.checkpoint
    manifest = checkpoint_to_resume(config)
    if manifest is None or c.load is None:
        if c.load is not None:
            say(f" > no checkpoint in {c.load} yet: starting from the beginning")
        trainer.initialise()
        return Progress()
    weights_only = c.finetune or c.no_load_optim
    targets = checkpoint_tensors(trainer, with_moments=not weights_only)
    if weights_only and (missing := targets.keys() - manifest.tensors.keys()):
        raise CheckpointError(
            f"the checkpoint in {c.load} lacks {len(missing)} weights of this model, such as {min(missing)!r}"
        )
    loaded = load_checkpoint(c.load, targets, iteration=c.ckpt_step, strict=not weights_only, report=_only_missing(say))
    trainer.model.publish()
    say(f" > loaded {loaded.path} (iteration {loaded.iteration})")
    if c.finetune:
        _tell_finetuned_differences(config, loaded.meta, say)
        return Progress()
    # Where the newest was damaged, an older one has been taken.
    stored = _accepted(config, inputs, dataclasses.replace(manifest, iteration=loaded.iteration, meta=loaded.meta))
    _tell_differences(config, inputs, stored, say)
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        trainer.schedule = Schedule(**stored.schedule)
    if not weights_only:
        trainer.model.optimizer.steps_taken = stored.optimizer_steps
    trainer.loss_scale.load(stored.loss_scale)
    return stored.progress


def _accepted(config: Config, inputs: Inputs, manifest: Manifest) -> StoredRun:
    """What the checkpoint says of its run, if this run may go on from it.

    Raises:
        CheckpointError: it may not; with every reason.
    """
    c = config.checkpoint
    assert c.load is not None
    path = checkpoint_path(Path(c.load), manifest.iteration)
    stored = stored_run(path, manifest.meta, same_run.COMPARED)
    problems = list(_refusals(config, inputs, stored))
    if not c.no_load_optim and not any(name.startswith("exp_avg/") for name in manifest.tensors):
        problems.append("it was saved without the optimizer's moments: add --no-load-optim.")
    if problems:
        listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise CheckpointError(f"{path} cannot be resumed by this command line:\n{listing}")
    return stored


def _refusals(config: Config, inputs: Inputs, stored: StoredRun) -> Iterator[str]:
    """Why this run is not the checkpoint's, a sentence for each kind of difference."""
    evaluates_only = config.logging.skip_train
    if other_model := same_run.differing(Rule.MODEL, stored.config, config, stored.known):
        yield (
            f"it is another model ({'; '.join(other_model)}): take the checkpoint's values, or begin a new run from "
            "its weights with --finetune."
        )
    if differ := _differences(stored.tokenizer, inputs.tokenizer):
        yield f"it was trained with another tokenizer ({differ}): use the same one, or --finetune."
    other_data = _other_data(config, inputs, stored)
    if other_data and not config.data.override_data and not evaluates_only:
        yield (
            f"it was trained on other data ({'; '.join(other_data)}): take the checkpoint's; or add --override-data to "
            f"go on at sample {stored.progress.consumed_samples:,} of this command line's; or begin anew with "
            "--finetune."
        )
    o = config.optimizer
    if o.use_checkpoint_opt_param_scheduler or o.override_opt_param_scheduler or evaluates_only:
        return
    here = make_schedule(config, BatchPlan.of(config.batch, stored.progress).train_samples)
    if differ := _differences(stored.schedule, dataclasses.asdict(here)):
        yield (
            f"its schedule is another one ({differ}; lengths in samples or tokens): add --override-opt-param-scheduler "
            "to take this command line's, or --use-checkpoint-opt-param-scheduler."
        )


def _other_data(config: Config, inputs: Inputs, stored: StoredRun) -> list[str]:
    differ = same_run.differing(Rule.DATA, stored.config, config, stored.known)
    if "data.mock_data" in stored.known and not stored.config.data.mock_data and not config.data.mock_data:
        differ += same_run.other_corpora(_corpora(stored), inputs.corpora)
    return differ


def _corpora(stored: StoredRun) -> Corpora:
    """A checkpoint from before corpora were identified still says where they were."""
    return same_run.corpora_named(stored.config.data) if stored.corpora is None else stored.corpora


def _tell_differences(config: Config, inputs: Inputs, stored: StoredRun, say: Callable[[str], None]) -> None:
    """What differs and was accepted, because people change it on purpose or because they asked for it."""
    differ = same_run.differing(Rule.TOLD, stored.config, config, stored.known)
    if not config.logging.skip_train:
        differ += _other_data(config, inputs, stored)
        differ += same_run.unidentified_corpora(_corpora(stored), inputs.corpora)
    if differ:
        say(f" > unlike the checkpoint: {'; '.join(differ)}")


def _tell_finetuned_differences(config: Config, meta: dict[str, Any], say: Callable[[str], None]) -> None:
    there, known, _ = stored_config(meta.get("config"), same_run.COMPARED)
    if differ := same_run.differing(Rule.MODEL, there, config, known):
        say(f" > fine-tuning another model than the checkpoint's: {'; '.join(differ)}")


def _only_missing(say: Callable[[str], None]) -> Callable[[str], None]:
    """Leaves out the reports of moments that were not asked for."""
    return lambda sentence: None if "nothing asks for it" in sentence else say(f" > {sentence}")


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    keys = [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]
    return "; ".join(f"{key} {saved.get(key)} there, {here.get(key)} here" for key in keys)
