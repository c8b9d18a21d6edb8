"""Decides whether a run may go on from a checkpoint, and reports all that speaks against it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptpar.checkpoint import Manifest
from gptpar.checkpoint.folders import checkpoint_path
from gptpar.config import CheckpointConfig, Config, Flags
from gptpar.config.stored import fits, problem_of, problems_of, stored_config, unusable, wrong_value
from gptpar.errors import CheckpointError, numbered, printable
from gptpar.exchange import CONVERTED
from gptpar.optim.adamw import ADAMW
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.muon import MUON
from gptpar.optim.optimizers import updates_of
from gptpar.optim.schedule import Schedule, make_schedule
from gptpar.optim.skip_step import is_window
from gptpar.run import same_run
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import data_order, other_order
from gptpar.run.progress import Progress
from gptpar.run.same_run import Corpora, Rule
from gptpar.topology.tensor_parts import kind_of


@dataclass(frozen=True)
class Inputs:
    """The sources of a run's tokens, kept so that a checkpoint is not continued with others unnoticed.

    Attributes:
        tokenizer: the tokenizer's identity.
        corpora: the corpora's identities when the run began, by the field that names them.
        data_order: what the order of the training samples depends on beside them.
        tokenizer_files: name -> contents of the files that the tokenizer is made from; each checkpoint gets a copy.
    """

    tokenizer: dict[str, Any]
    corpora: Corpora
    data_order: dict[str, Any]
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)

    @staticmethod
    def of(
        config: Config,
        tokenizer: dict[str, Any],
        data_parallel_size: int = 1,
        tokenizer_files: Mapping[str, bytes] | None = None,
    ) -> Inputs:
        """Collect the sources that a configuration names; a little of each corpus is read."""
        corpora, order = same_run.corpora_of(config.data), data_order(config, data_parallel_size)
        return Inputs(tokenizer, corpora, order, tokenizer_files or {})


def accepted(config: Config, inputs: Inputs, manifest: Manifest) -> StoredRun:
    """The run that a checkpoint describes, if this run may go on from it.

    Raises:
        CheckpointError: it may not; with every reason.
    """
    c = config.checkpoint
    assert c.load is not None
    path = checkpoint_path(Path(c.load), manifest.iteration)
    stored = _begun_anew(c, stored_run(path, manifest.meta, same_run.COMPARED))
    problems = list(_refusals(config, inputs, stored))
    if not c.no_load_optim:
        problems += _state_problems(config, stored, manifest)
    if problems:
        listing = numbered(list(map(printable, problems)))
        raise CheckpointError(f"{path} cannot be resumed by this command line:\n{listing}")
    return stored


def _begun_anew(c: CheckpointConfig, stored: StoredRun) -> StoredRun:
    """Reset the progress that the flags name: place in the data, place in the schedule, both or neither."""
    progress = Progress(scheduled_samples=stored.progress.scheduled_samples) if c.reset_iteration else stored.progress
    if c.no_load_lr_state:
        progress = dataclasses.replace(progress, scheduled_samples=0)
    return dataclasses.replace(stored, progress=progress)


def _state_problems(config: Config, stored: StoredRun, manifest: Manifest) -> Iterator[str]:
    """Why the checkpoint's optimizer state cannot be taken over."""
    name, before = config.optimizer.optimizer, stored.config.optimizer.optimizer
    kinds = set(map(kind_of, manifest.tensors))
    of_matrices, of_others = updates_of(config.optimizer)
    states = {*of_others.states, *(of_matrices.states if of_matrices else ())}
    if "optimizer.optimizer" in stored.known and name != before and not _takes_over(name, before):
        lacks = (before, name) == (MUON.name, ADAMW.name)
        why = "; Muon's matrices have no second moment, which AdamW divides by" * lacks
        yield (
            f"its optimizer state is that of --optimizer {before}, and this run has --optimizer {name}{why}: take the "
            "same, or add --no-load-optim to begin with a state of zero."
        )
    elif not kinds >= states:
        yield "it was saved without the optimizer's moments: add --no-load-optim."


def _takes_over(name: str, before: str) -> bool:
    """Whether an optimizer goes on with the state of another one."""
    return (before, name) == (ADAMW.name, MUON.name)


def _refusals(config: Config, inputs: Inputs, stored: StoredRun) -> Iterator[str]:
    """Why this run is not the checkpoint's, a sentence for each kind of difference."""
    evaluates_only = config.logging.skip_train
    if other_model := same_run.differing(Rule.MODEL, stored.config, config, stored.known):
        yield (
            f"it is another model ({'; '.join(other_model)}): take the checkpoint's values, or begin a new run from "
            "its weights with --finetune."
        )
    if differ := _other_tokenizer(stored.tokenizer, inputs.tokenizer):
        yield f"it was trained with another tokenizer ({differ}): use the same one, or --finetune."
    other_data = _other_data(config, inputs, stored)
    if other_data and not (config.data.override_data or config.checkpoint.reset_iteration or evaluates_only):
        yield (
            f"it was trained on other data ({'; '.join(other_data)}): take the checkpoint's; or add --override-data to "
            f"go on at sample {stored.progress.consumed_samples:,} of this command line's; or begin anew with "
            "--finetune."
        )
    if not evaluates_only:
        yield from _other_schedule(config, stored)


def _other_schedule(config: Config, stored: StoredRun) -> Iterator[str]:
    """Problems of the schedule: the checkpoint's differs and no flag chooses one, or it is chosen and has ended."""
    o, plan = config.optimizer, BatchPlan.of(config.batch, stored.progress)
    if o.override_opt_param_scheduler or config.checkpoint.no_load_lr_state:
        return
    here = make_schedule(config, plan.train_samples)
    ended = _has_ended(Schedule(**stored.schedule), plan, config.model.seq_length, stored.progress)
    if o.use_checkpoint_opt_param_scheduler:
        if ended:
            yield (
                f"--use-checkpoint-opt-param-scheduler: {ended}: give --override-opt-param-scheduler in its place, or "
                "the length of the former run."
            )
    elif differ := _differences(_with_effect(stored.schedule), _with_effect(dataclasses.asdict(here))):
        other = "" if ended else ", or --use-checkpoint-opt-param-scheduler"
        yield (
            f"its schedule is another one ({differ}; lengths in samples or tokens): add --override-opt-param-scheduler "
            f"to take this command line's{other}."
        )


def _has_ended(there: Schedule, plan: BatchPlan, seq_length: int, progress: Progress) -> str:
    """A clause if this run is longer than the schedule's, and would take its last step at the learning rate 0."""
    unit, lag = seq_length if there.in_tokens else 1, progress.consumed_samples - progress.scheduled_samples
    total, last = plan.train_samples * unit, (plan.train_samples - plan.full - lag) * unit
    if there.max_lr <= 0 or total <= there.total or there.learning_rate(last) > 0:
        return ""
    return f"it is for a run of {there.total:,.0f}, and its learning rate is 0 at the end of this one, {total:,}"


def _other_tokenizer(saved: dict[str, Any], here: dict[str, Any]) -> str:
    """The differences of two tokenizers. Of a converted checkpoint only the vocabulary size is stored, and compared."""
    converted = saved.get("type") == CONVERTED
    return _differences(saved, {name: here.get(name) for name in saved} | {"type": CONVERTED} if converted else here)


def _with_effect(schedule: dict[str, Any]) -> dict[str, Any]:
    """The values of a schedule that have an effect; a longer run may have the same rate and weight decay.

    A constant weight decay does not grow over the run, and a constant rate does not decay.
    """
    idle = {name for name, style in (("total", "decay_style"), ("decay", "style")) if schedule[style] == "constant"}
    return {name: value for name, value in schedule.items() if name not in idle}


def _other_data(config: Config, inputs: Inputs, stored: StoredRun) -> list[str]:
    differ = same_run.differing(Rule.DATA, stored.config, config, stored.known)
    differ += other_order(stored.data_order, stored.config.data, inputs.data_order)
    if "data.mock_data" in stored.known and not stored.config.data.mock_data and not config.data.mock_data:
        differ += same_run.other_corpora(_corpora(stored), inputs.corpora)
    return differ


def _corpora(stored: StoredRun) -> Corpora:
    """A checkpoint from before corpora were identified still says where they were."""
    return same_run.corpora_named(stored.config.data) if stored.corpora is None else stored.corpora


def report_differences(config: Config, inputs: Inputs, stored: StoredRun, say: Callable[[str], None]) -> None:
    """Report differences that were accepted: people change these flags on purpose, or asked for the change."""
    differ = same_run.differing(Rule.REPORTED, stored.config, config, stored.known)
    if not config.logging.skip_train:
        differ += _other_data(config, inputs, stored)
        differ += same_run.unidentified_corpora(_corpora(stored), inputs.corpora)
        differ += same_run.other_evaluation(stored.config, stored.corpora or {}, config, inputs.corpora)
    if differ:
        say(printable(f" > unlike the checkpoint: {'; '.join(differ)}"))
    if (
        _takes_over(config.optimizer.optimizer, stored.config.optimizer.optimizer)
        and not config.checkpoint.no_load_optim
    ):
        say(
            " > the matrices' first moments become Muon's momentum, and their second moments are dropped; AdamW goes "
            "on with everything else"
        )
    if config.batch.train_minutes is not None and stored.progress.fitted_iters is not None:
        say(f" > the run keeps the {stored.progress.fitted_iters:,} steps that were fitted to its minutes once")
    if not config.logging.skip_train:
        _report_new_order(config, inputs, stored, say)


def _report_new_order(config: Config, inputs: Inputs, stored: StoredRun, say: Callable[[str], None]) -> None:
    there = stored.schedule["total"] / (config.model.seq_length if stored.schedule["in_tokens"] else 1)
    here = BatchPlan.of(config.batch, stored.progress).train_samples
    if same_run.reshuffled(config, inputs.corpora, there, here):
        say(
            f" > the run has {here:,} samples in place of {there:,.0f}: epochs are shuffled together, so the samples "
            "to come are in another order, and some come again"
        )


def report_finetuned_differences(config: Config, meta: dict[str, Any], say: Callable[[str], None]) -> None:
    there, known, _ = stored_config(meta.get("config"), same_run.COMPARED)
    if differ := same_run.differing(Rule.MODEL, there, config, known):
        say(printable(f" > fine-tuning another model than the checkpoint's: {'; '.join(differ)}"))


def check_learned_positions(config: Config, meta: dict[str, Any]) -> None:
    """Raise a ``CheckpointError`` if a run is fine-tuned from a table of positions of another length."""
    there, known, _ = stored_config(meta.get("config"), same_run.COMPARED)
    before, now = there.model.max_position_embeddings, config.model.max_position_embeddings
    learned = all(one.position_embedding_type == "learned_absolute" for one in (there.model, config.model))
    if learned and "model.max_position_embeddings" in known and before != now:
        raise CheckpointError(
            f"the checkpoint in --load {config.checkpoint.load} has learned positions for samples of up to {before} "
            f"tokens, and --max-position-embeddings is {now}: a table of positions can be neither stretched nor cut; "
            f"take {before}, or begin with --position-embedding-type rope (see --rope-scaling-type)."
        )


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    keys = [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]
    return "; ".join(f"{key} {saved.get(key)} there, {here.get(key)} here" for key in keys)


MAY_BE_NEGATIVE = ("max_lr", "min_lr", "init_lr", "tolerance")


@dataclass(frozen=True)
class StoredRun:
    """The facts that a run needs to go on, besides the tensors.

    Attributes:
        tokenizer: the tokenizer's identity.
        corpora: the corpora's identities by flag, as ``corpora_of`` gives them; ``None``: saved before they were kept.
        data_order: as :func:`~gptpar.run.data.data_order` gives it; ``None``: likewise.
        skip_step: the window of outliers; ``None``: no step was judged.
        config: the run's configuration, as far as it was asked for; former versions stored what was typed, too.
        known: the fields of it that the checkpoint says, as ``section.field``.
    """

    progress: Progress
    optimizer_steps: int
    loss_scale: dict[str, Any]
    schedule: dict[str, Any]
    tokenizer: dict[str, Any]
    corpora: dict[str, list[dict[str, Any]]] | None
    data_order: dict[str, Any] | None
    skip_step: dict[str, Any] | None
    config: Flags
    known: frozenset[str]


def stored_run(path: Path, meta: dict[str, Any], wanted: Collection[str]) -> StoredRun:
    """The run of a checkpoint's meta.

    Args:
        path: of the checkpoint, for messages.
        wanted: the fields of the configuration that will be read, as ``section.field``.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    config, known, problems = stored_config(meta.get("config"), wanted)
    problems += [
        *problems_of(Progress, meta.get("progress"), "progress"),
        *problem_of(int, meta.get("optimizer_steps"), "optimizer_steps"),
        *problems_of(LossScale, meta.get("loss_scale"), "loss_scale", MAY_BE_NEGATIVE),
        *problems_of(Schedule, meta.get("schedule"), "schedule", MAY_BE_NEGATIVE),
        *problem_of(dict, meta.get("tokenizer"), "tokenizer"),
        *_corpora_problems(meta.get("corpora")),
        *problem_of(dict, meta.get("data_order", {}), "data_order"),
    ]
    if (window := meta.get("skip_step")) is not None and not is_window(window):
        problems.append(wrong_value("skip_step", window, "a window of losses and as many norms"))
    if problems:
        raise unusable(path, problems, "--finetune begins a new run from its weights, --ckpt-step N takes another one.")
    return StoredRun(
        progress=Progress(**meta["progress"]),
        optimizer_steps=meta["optimizer_steps"],
        loss_scale=meta["loss_scale"],
        schedule=meta["schedule"],
        tokenizer=meta["tokenizer"],
        corpora=meta.get("corpora"),
        data_order=meta.get("data_order"),
        skip_step=meta.get("skip_step"),
        config=config,
        known=known,
    )


def _corpora_problems(corpora: object) -> Iterator[str]:
    if corpora is None:
        return
    lists = list(corpora.values()) if isinstance(corpora, dict) else [None]
    entries = [entry for one in lists for entry in (one if isinstance(one, list) else [None])]
    kinds = {"prefix": str, "weight": float | None, "sequences": int, "tokens": int, "sha256": str}
    for entry in entries:
        if not isinstance(entry, dict) or any(not fits(entry.get(name), kind) for name, kind in kinds.items()):
            yield wrong_value("corpora", corpora, "lists of corpora, each with its numbers of sequences and tokens")
            return
