"""Reconciles the ``scheduler`` of a DeepSpeed file with the command line's flags. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gptpar.config import Flags
from gptpar.config.deepspeed_reader import Said

_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_FLAGS = {
    "warmup_min_lr": "lr_warmup_init",
    "warmup_max_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
"""Parameter of a schedule -> the flag that means the same, and counts if the file lacks the parameter."""
_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
_OTHER_LENGTHS = ("lr_decay_samples", "lr_decay_tokens", "lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_tokens")


@dataclass(frozen=True)
class FileSchedule:
    """A schedule of DeepSpeed's.

    Attributes:
        type: one of ``gptpar.optim.step_schedules.FORMULAS``.
        params: of its formula.
        peak: the rate in place of ``--lr``; ``None``: the optimizer's rate.
        contradictions: (the file's value, the field of a flag that contradicts it, the flag's value).
    """

    type: str
    params: dict[str, Any]
    peak: float | None
    contradictions: list[tuple[Said, str, Any]]


def schedule_of(values: Mapping[str, Said], flags: Flags, given: Set[str]) -> FileSchedule:
    """The file's schedule. A flag may give a parameter that the file lacks; other flags of the schedule contradict it.

    Args:
        values: the file's values and DeepSpeed's defaults, by field.
        flags: the command line's, with the file's optimizer.
        given: the fields that were typed.
    """
    kind = values["scheduler.type"]
    said = {name.removeprefix("scheduler."): one for name, one in values.items() if name.startswith("scheduler.")}
    del said["type"]
    typed = {word: getattr(flags.optimizer, flag) for word, flag in _FLAGS.items() if f"optimizer.{flag}" in given}
    params = _params(kind.value, said, typed, flags)
    contradictions = [
        (said.get(word, kind), _FLAGS[word], value) for word, value in typed.items() if params.get(word, value) != value
    ]
    contradictions += [(kind, name, value) for name, value in _other_shape(kind.value, params, flags, given)]
    peak = next((params[name] for name in _PEAKS if name in params), None)
    return FileSchedule(kind.value, params, peak, contradictions)


def _params(kind: str, said: Mapping[str, Said], typed: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """All parameters: those that the file lacks come from the optimizer's rate, the flags or the run's length."""
    optimizer = flags.optimizer
    known = {**typed} if optimizer.lr is None else {**typed, "warmup_max_lr": optimizer.lr}
    params = {word: known[word] if one.default and word in known else one.value for word, one in said.items()}
    if kind in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", optimizer.lr_decay_iters or flags.batch.train_iters)
    return params


def _other_shape(kind: str, params: Mapping[str, Any], flags: Flags, given: Set[str]) -> Iterator[tuple[str, Any]]:
    """(field, value) of each typed flag that describes another schedule."""
    optimizer = flags.optimizer
    lowest = params.get("warmup_min_lr") if kind == "WarmupDecayLR" else None
    if kind == "WarmupCosineLR" and optimizer.lr is not None:
        lowest = params["cos_min_ratio"] * optimizer.lr
    agrees = {
        "lr_decay_style": _STYLES.get(kind) == optimizer.lr_decay_style,
        "min_lr": lowest is None or math.isclose(lowest, optimizer.min_lr, rel_tol=1e-9),
    }
    for name in (*agrees, *_OTHER_LENGTHS):
        if f"optimizer.{name}" in given and not agrees.get(name, False):
            yield name, getattr(optimizer, name)
