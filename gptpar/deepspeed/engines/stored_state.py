"""The state in an engine's checkpoint beside its tensors (counters, scheduler, groups), checked before use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from gptpar.checkpoint.manifest import Manifest
from gptpar.deepspeed.engines.plain_values import from_json, to_json
from gptpar.errors import CheckpointError
from gptpar.optim.skip_step import is_window

WRITER = "gptpar.initialize"
"""Distinguishes an engine's checkpoints from those of a GPT run."""


@dataclass(frozen=True)
class Chosen:
    """Which parts of a checkpoint are loaded.

    Attributes:
        strict: whether checkpoint and engine must have the same parameters, persistent buffers and moments.
        optimizer: whether to load moments, the number of updates, and the groups' hyperparameters.
        scheduler: whether to load the schedule's state.
        module_only: whether to load parameters and buffers alone, without optimizer, schedule and counts.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False

    @property
    def moments(self) -> bool:
        return self.optimizer and not self.module_only

    @property
    def schedule(self) -> bool:
        return self.scheduler and not self.module_only


@dataclass(frozen=True)
class UsersPart:
    """What a save keeps beside the engine's own state.

    Attributes:
        client: numbers, texts, tensors, arrays, bytes; lists, tuples, sets, dictionaries and namespaces of these. The
            first process's is saved.
        latest: whether a load without a tag takes this checkpoint.
        frozen: whether it has the weights that are not trained.
    """

    client: Any = None
    latest: bool = True
    frozen: bool = True


@dataclass(frozen=True)
class StoredState:
    """The state of an engine that is not tensors, in values that JSON can hold.

    Attributes:
        tag: the user's name of the checkpoint.
        counts: the engine's counts, by :data:`ENGINE_COUNTS`, and ``optimizer_steps``, the number of steps for bias
            corrections. Old checkpoints lack ``global_samples``.
        loss_scale: as :meth:`LossScale.state <gptpar.optim.loss_scale.LossScale.state>` returns it.
        groups: of the optimizer; ``params`` has the parameters' names.
        scheduler: ``class`` and ``state``; ``None``: there is none.
        aliases: each further name of a parameter or buffer -> its first one.
        extra: path of a module -> the result of its ``get_extra_state``.
        client: the user's own state.
        skip_step: the window of outliers; ``None``: no step is judged.
        frozen: names of the weights that are not trained; older checkpoints lack them.
        missed: name -> steps that the parameter missed while it was frozen; older checkpoints lack them.
        complex_buffers: names of buffers that are stored as pairs of numbers; older checkpoints lack them.
    """

    tag: str
    counts: dict[str, int]
    loss_scale: dict[str, Any]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    aliases: dict[str, str]
    extra: dict[str, Any]
    client: Any
    skip_step: dict[str, Any] | None = None
    frozen: list[str] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)
    complex_buffers: list[str] = field(default_factory=list)

    def to_meta(self) -> dict[str, Any]:
        """The checkpoint's ``meta``."""
        values = {name: value for name, value in asdict(self).items() if name != "skip_step" or value is not None}
        return {"writer": WRITER, **values, "torch": torch.__version__}


ENGINE_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
COUNTS = ("global_steps", "skipped_steps", "micro_steps", "optimizer_steps")
_SCALE = {"value": float, "dynamic": bool, "good_steps": int, "tolerance": int}


def tag_of(meta: Mapping[str, Any]) -> str | None:
    """The tag of an engine's checkpoint; ``None`` if it is not an engine's."""
    tag = meta.get("tag")
    return tag if meta.get("writer") == WRITER and isinstance(tag, str) else None


def read_state(path: Path, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> StoredState:
    """The state in a checkpoint's meta.

    Args:
        tensors: of the user's state, with any values.

    Raises:
        CheckpointError: the meta is not an engine's, or is damaged; it names everything.
    """
    if tag_of(meta) is None:
        raise CheckpointError(f"{path} is no engine's: gptpar pretrain --load goes on with its own runs.")
    unfit = [name for name, fits in _FITS.items() if not (fits(meta[name]) if name in meta else name in _OLDER_LACK)]
    problems = [f"{name} is {f'{meta[name]!r:.60}' if name in meta else 'missing'}" for name in unfit]
    try:
        from_json([meta.get(name) for name in ("groups", "scheduler", "extra")])
        from_json(meta.get("client"), tensors)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise CheckpointError(f"the meta of {path} is not that of an engine of this version: {'; '.join(problems)}.")
    return StoredState(**{one.name: meta[one.name] for one in fields(StoredState) if one.name in meta})


def room_for_client(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Name -> memory of each tensor of the user's state."""
    entries = ((name, one) for name, one in manifest.tensors.items() if name.startswith("client/"))
    return {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in entries}


def _are_counts(value: Any) -> bool:
    return _has(value, dict.fromkeys(COUNTS, int)) and _are_numbers(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(one) is int and one >= 0 for one in value.values())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _has(value: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(_is(value.get(name), kind) for name, kind in kinds.items())


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


_FITS: dict[str, Callable[[Any], bool]] = {
    "tag": lambda value: isinstance(value, str),
    "counts": _are_counts,
    "loss_scale": lambda value: _has(value, _SCALE) and value["value"] > 0,
    "groups": lambda value: isinstance(value, list) and all(_has(one, {"params": list}) for one in value),
    "scheduler": lambda value: value is None or _has(value, {"class": str, "state": dict}),
    "aliases": lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
    "extra": lambda value: isinstance(value, dict),
    "client": lambda value: True,
    "skip_step": is_window,
    "frozen": _are_texts,
    "missed": _are_numbers,
    "complex_buffers": _are_texts,
}
"""Field of :class:`StoredState` -> a function that checks whether a value can be the field's."""

_OLDER_LACK = ("skip_step", "frozen", "missed", "complex_buffers")
"""Fields that may be missing: ``skip_step`` where no step is judged, the others in older checkpoints."""


# Groups of the optimizer.


def groups_to_json(
    groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], problems: list[str]
) -> list[dict[str, Any]]:
    """The groups with their parameters' names (``members``)."""
    found = []
    for place, group in enumerate(groups):
        numbers = {name: value for name, value in group.items() if name != "params"}
        described = to_json(numbers, f"optimizer.param_groups[{place}]", problems)
        found.append({**described, "params": list(members[place])})
    return found


def group_differences(stored: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> Iterator[str]:
    """Sentences about parameters that the checkpoint has in other groups; both sides have equally many groups."""
    for place, (old, new) in enumerate(zip(stored, members, strict=True)):
        before, now = set(map(str, old["params"])), set(new)
        for one, where in ((before - now, "in the checkpoint"), (now - before, "here")):
            if one:
                yield f"group {place} has {_listed(one)} {where} only"


def load_groups(stored: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Load the groups' hyperparameters; a tensor remains the same object, because others may hold it."""
    for group, saved in zip(groups, stored, strict=True):
        for name, value in saved.items():
            if name == "params":
                continue
            if isinstance(group.get(name), torch.Tensor) and isinstance(value, int | float):
                group[name].fill_(value)
            else:
                group[name] = from_json(value)


# The schedule of the rates.


def scheduler_to_json(scheduler: LRScheduler | None, problems: list[str]) -> dict[str, Any] | None:
    """A scheduler's class and state as JSON; ``None`` without a scheduler."""
    if scheduler is None:
        return None
    kind = type(scheduler).__name__
    return {"class": kind, "state": to_json(scheduler.state_dict(), f"the state of lr_scheduler ({kind})", problems)}


def scheduler_problems(stored: Mapping[str, Any] | None, scheduler: LRScheduler | None) -> Iterator[str]:
    """A sentence if checkpoint and engine have schedulers of different classes, or only one has a scheduler."""
    before = "no lr_scheduler" if stored is None else f"the lr_scheduler {stored['class']}"
    now = "no lr_scheduler" if scheduler is None else f"the lr_scheduler {type(scheduler).__name__}"
    if before != now:
        yield f"the checkpoint has {before}, and the engine has {now}: load_lr_scheduler_states=False leaves it alone"


# Names.


def alias_problems(stored: Mapping[str, str], aliases: Mapping[str, str]) -> Iterator[str]:
    """Sentences about tensors that have several names on one side only."""
    for name in sorted(stored.keys() | aliases.keys()):
        if stored.get(name) == aliases.get(name):
            continue
        if name in stored:
            yield f"{name} and {stored[name]} are one tensor in the checkpoint, and two or named otherwise here"
        if name in aliases:
            yield f"{name} and {aliases[name]} are one tensor here, and two or named otherwise in the checkpoint"


def _listed(names: set[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
