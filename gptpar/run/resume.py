"""Decides from which checkpoint a GPT's run goes on, and restores the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gptpar.checkpoint import (
    HINT_NAME,
    LoadedCheckpoint,
    Manifest,
    checkpoints_in,
    edited_hint,
    find_checkpoints,
    first_usable,
    load_checkpoint,
    read_manifest,
)
from gptpar.config import CheckpointConfig, Config, Flags
from gptpar.errors import CheckpointError, ConfigError
from gptpar.exchange import start_from_hf, why_not_to_load, why_not_to_save
from gptpar.optim.optimizers import updates_of
from gptpar.optim.schedule import Schedule
from gptpar.run.accept import (
    Inputs,
    accepted,
    check_learned_positions,
    report_differences,
    report_finetuned_differences,
)
from gptpar.run.moment_formats import may_differ, take_up_moments
from gptpar.run.progress import Progress
from gptpar.run.run_folder.branches import branch_with
from gptpar.run.saved_state import checkpoint_tensors
from gptpar.run.trainer import Trainer
from gptpar.system.restart import memory_folder
from gptpar.topology.tensor_parts import kind_of

_NEW_WEIGHTS = ", or leave --load out and choose another --save to start with new weights"


def folder_problems(config: CheckpointConfig) -> Iterator[str]:
    """Problems of the contents of ``--load`` and ``--save``: this run neither goes on from them nor may write there."""
    load, save = config.load, config.save
    if load and (problem := why_not_to_load(load, _NEW_WEIGHTS)):
        yield problem
    if not save or goes_on(config):
        return
    for flag, folder in (("--save", save), ("--save-local", config.save_local)):
        if folder is None:
            continue
        if problem := why_not_to_save(folder, flag):
            yield problem
        elif found := find_checkpoints(folder):
            yield (
                f"{flag} {folder} already holds checkpoints (newest: iteration {found[0][0]}): add --load {save} to go "
                "on from there, or choose another folder."
            )


def goes_on(config: CheckpointConfig) -> bool:
    """Whether the run loads from the folder in which it saves."""
    return bool(config.load and config.save) and Path(str(config.load)).resolve() == Path(str(config.save)).resolve()


def folders_to_load(config: Config | Flags, load: str) -> list[Path]:
    """The folders to search for the newest whole checkpoint: ``--load``, and if the run itself goes on, its others.

    These are ``--save-local``, and this machine's copies in memory; a first start finds no copies.
    """
    c, folder = config.checkpoint, folder_to_load(config, load)
    if not goes_on(c) or c.begins_anew:
        return [folder]
    return [folder, *(Path(one) for one in (c.save_local, memory_folder()) if one)]


def refuse_foreign_folders(config: Config) -> None:
    """Refuse to save beside checkpoints that are not this run's: it would fail hours later, or hide them.

    Raises:
        ConfigError: ``--load`` or ``--save`` holds another program's checkpoint, or ``--save`` another run's.
    """
    if problems := list(folder_problems(config.checkpoint)):
        raise ConfigError(problems)


def checkpoint_to_resume(config: Config | Flags) -> Manifest | None:
    """The manifest of the checkpoint that ``--load`` (and ``--ckpt-step``) mean; ``None`` for a fresh start.

    Raises:
        CheckpointError: there is none although one is required, or none whose manifest can be read.
    """
    found = path_to_resume(config)
    return None if found is None else found[1]


def path_to_resume(config: Config | Flags) -> tuple[Path, Manifest] | None:
    """The same checkpoint's path and manifest. Its folder may be renamed: then it has another iteration's number."""
    c = config.checkpoint
    if c.load is None:
        return None
    if problem := why_not_to_load(c.load, _NEW_WEIGHTS):
        raise CheckpointError(problem)
    found = checkpoints_in(folders_to_load(config, c.load))
    branch = branch_with(c.load, c.ckpt_step)  # where all checkpoints are in branches, nobody wants random weights
    required = c.exit_on_missing_checkpoint or c.begins_anew or config.logging.skip_train or c.ckpt_step is not None
    if not found and not required and branch is None:
        return None
    chosen = [path for number, path in found if c.ckpt_step in (None, number)]
    if usable := first_usable(chosen, lambda path: (path, read_manifest(path))):  # load_checkpoint names those before
        return usable
    wanted = "checkpoint" if c.ckpt_step is None else f"checkpoint of iteration {c.ckpt_step}"
    elsewhere = "" if branch is None else f"; a run that went back left one in --load {branch}"
    raise CheckpointError(f"there is no readable {wanted} in --load {c.load}{elsewhere}: {instead_of(found)}")


def instead_of(found: Sequence[tuple[int, Path]]) -> str:
    """Advice: the flags to give in place of a folder, or an iteration, whose checkpoint cannot be read.

    Args:
        found: (iteration, path) of the checkpoints that are there.
    """
    if not found:
        return "it has none, so give the --save folder of a run that has saved"
    have = ", ".join(str(number) for number in sorted(number for number, _ in found))
    return f"it has {have}; gptpar inspect says whether they are whole"


def folder_to_load(config: Config | Flags, load: str) -> Path:
    """``--load``, or its last branch if a fine-tuning in the same folder has moved all checkpoints there.

    It does so before its first save. Killed in between and started again, it begins with the same weights.
    """
    moved = config.checkpoint.begins_anew and not find_checkpoints(load)
    return (branch_with(load, config.checkpoint.ckpt_step) if moved else None) or Path(load)


def progress_to_resume(config: Config, inputs: Inputs) -> Progress:
    """The progress from which the run will go on, known before anything is built.

    Raises:
        CheckpointError: the checkpoint is of another run; with all that differs.
    """
    manifest = checkpoint_to_resume(config)
    if manifest is None:
        return Progress()
    if config.checkpoint.finetune:
        check_learned_positions(config, manifest.meta)
        return Progress()
    return accepted(config, inputs, manifest).progress


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
        return _begin(trainer, say)
    folder = folder_to_load(config, c.load)
    if folder != Path(c.load):
        say(f" > all checkpoints of {c.load} are in branches: fine-tuning begins with {folder}")
    weights_only = c.finetune or c.no_load_optim
    targets = checkpoint_tensors(trainer, weights_only=weights_only)
    if weights_only and (missing := targets.keys() - manifest.tensors.keys()):
        raise CheckpointError(
            f"the checkpoint in {folder} lacks {len(missing)} weights of this model, such as {min(missing)!r}"
        )
    loaded = load_checkpoint(
        *(folders_to_load(config, c.load), targets),
        iteration=c.ckpt_step,
        strict=not weights_only,
        may_stay=lambda name: _is_dropped(config, name),
        may_cast=lambda name, stored: may_differ(name, stored, targets[name].dtype),
        complete=lambda path, manifest: take_up_moments(path, manifest, targets),
        apart=memory_folder(),
        report=_only_missing(say),
    )
    trainer.engine.publish()
    trainer.experts.load(loaded.meta.get("experts"))
    _say_which(loaded, folder, c.ckpt_step, say)
    if c.finetune:
        report_finetuned_differences(config, loaded.meta, say)
        return Progress()
    # Where the newest was damaged, an older one has been taken.
    stored = accepted(config, inputs, dataclasses.replace(manifest, iteration=loaded.iteration, meta=loaded.meta))
    report_differences(config, inputs, stored, say)
    for sentence in loaded.completed:
        say(f" > {sentence}")
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        trainer.schedule = Schedule(**stored.schedule)
    if not weights_only:
        trainer.engine.optimizer.steps_taken = stored.optimizer_steps
    trainer.loss_scale.load(stored.loss_scale)
    if trainer.skip_step is not None:
        trainer.skip_step.load(stored.skip_step)
    return stored.progress


def _say_which(loaded: LoadedCheckpoint, folder: Path, wanted: int | None, say: Callable[[str], None]) -> None:
    say(f" > loaded {loaded.path} (iteration {loaded.iteration})")
    if wanted is None and (named := edited_hint(folder)) not in (None, loaded.iteration):
        say(
            f" > {HINT_NAME} names iteration {named}, but the newest checkpoint is taken whatever it says: add "
            f"--ckpt-step {named} to go back to that one"
        )


def _begin(trainer: Trainer, say: Callable[[str], None]) -> Progress:
    """The start of a new run: initial weights, or those of ``--load-hf``."""
    trainer.initialise()
    checkpoint = trainer.config.checkpoint
    if (folder := checkpoint.load_hf) is not None:
        kept_with = Path(checkpoint.save) if checkpoint.save and trainer.topology.is_main else None
        weights = trainer.engine.optimizer.parts("weights")
        mixture = trainer.config.model if checkpoint.moe_use_upcycling else None
        kind = start_from_hf(Path(folder), weights, kept_with, mixture)
        trainer.engine.publish()
        say(f" > weights of the {kind} model in {folder}")
    return Progress()


def _is_dropped(config: Config, name: str) -> bool:
    """Whether a tensor of a checkpoint may be a state that matrices have with AdamW and do not have with this run."""
    of_matrices, of_others = updates_of(config.optimizer)
    kind = kind_of(name)
    return of_matrices is not None and kind in of_others.states and kind not in of_matrices.states


def _only_missing(say: Callable[[str], None]) -> Callable[[str], None]:
    """Leaves out the reports of moments that were not asked for."""
    return lambda sentence: None if "nothing asks for it" in sentence else say(f" > {sentence}")
