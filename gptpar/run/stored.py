"""Checks a checkpoint's description of its run before use: a stranger, or a later version, may have written it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptpar.config import Flags
from gptpar.config.stored import fits, problem_of, problems_of, stored_config, unusable, wrong_value
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.schedule import Schedule
from gptpar.optim.skip_step import is_window
from gptpar.run.progress import Progress

MAY_BE_NEGATIVE = ("max_lr", "min_lr", "init_lr", "tolerance")


@dataclass(frozen=True)
class StoredRun:
    """What going on with a run needs beside its tensors.

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
        *_window_problems(meta.get("skip_step")),
    ]
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


def _window_problems(state: object) -> Iterator[str]:
    if state is not None and not is_window(state):
        yield wrong_value("skip_step", state, "a window of losses and as many norms")


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
