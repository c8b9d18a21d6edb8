"""The rule of each flag on resuming: whether a difference from the checkpoint is refused, reported or allowed.

Layout, offload, recomputation and logging may differ: a checkpoint is one for all of them. What makes another model of
the same weights, or another order of the samples, may not, unless the user says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any

from gptpar.config import Config, DataConfig, DataFlags, Flags
from gptpar.config.fields import flag_name
from gptpar.config.sections.data import SPLIT
from gptpar.config.sections.positions import SCALED_BY
from gptpar.data.blend import SURPLUS
from gptpar.data.identity import blend_identity, blend_of
from gptpar.data.splits import normalized_split
from gptpar.optim.optimizers import OPTIMIZERS
from gptpar.system.files import facts_in

Corpora = Mapping[str, list[dict[str, Any]]]


class Rule(Enum):
    """The meaning of a field's difference to a run that goes on."""

    MODEL = auto()  # the same weights compute something else: refused, unless --finetune
    DATA = auto()  # the samples to come are others, or count otherwise: refused, unless --override-data or --finetune
    REPORTED = auto()  # people change it on purpose: one line reports it
    ELSEWHERE = auto()  # part of the schedule, or of the corpora's or tokenizer's identity, which are compared whole
    FREE = auto()  # how the same is computed, for how long, or what is shown of it; or only ever read at a fresh start


_FACTS = facts_in("same_run.toml", __file__)
_BY_RULE = {Rule[name]: " ".join(fields) for name, fields in _FACTS.items()}
RULES: dict[str, Rule] = {
    **{name: rule for rule, names in _BY_RULE.items() for name in names.split()},
    **{f"optimizer.{flag}": Rule.REPORTED for one in OPTIMIZERS.values() for flag in one.flags},
}
"""``section.field`` -> rule, for each field of each section that is not free as a whole."""

_FOLLOWS_FROM = {
    "model.padded_vocab_size": "--make-vocab-size-divisible-by: a padded vocabulary of",
    "model.softmax_vocab_size": "--softmax-over-padding: token ids in the softmax",
}
"""Names of fields without a flag, for messages."""

DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")

COMPARED = frozenset(
    [
        *(name for name, rule in RULES.items() if rule in (Rule.MODEL, Rule.DATA, Rule.REPORTED)),
        *(f"data.{name}" for name in DATA_PATHS),
    ]
)
"""The fields of a stored configuration that are read."""


def _is_scaled_by(name: str, config: Flags | Config) -> bool:
    return config.model.rope_scaling_type in SCALED_BY[name]


# Where a field has no effect it may differ; a difference of the other field is reported.
_MATTERS: dict[str, Callable[[Flags | Config], bool]] = {
    "model.max_position_embeddings": lambda c: c.model.position_embedding_type == "learned_absolute",
    "model.rotary_base": lambda c: c.model.position_embedding_type == "rope",
    "model.rotary_percent": lambda c: c.model.position_embedding_type == "rope",
    "model.rope_pattern": lambda c: c.model.position_embedding_type == "rope",
    "model.rope_scaling_type": lambda c: c.model.position_embedding_type == "rope",
    **{f"model.{name}": partial(_is_scaled_by, name) for name in SCALED_BY},
    "model.add_qkv_bias": lambda c: not c.model.add_bias_linear,
    "model.moe_token_drop_policy": lambda c: c.model.moe_expert_capacity_factor is not None,
    "batch.micro_batch_size": lambda c: c.model.balances_micro_batches,
    "data.reset_position_ids": lambda c: c.model.position_embedding_type != "none",
    "data.split": lambda c: not c.data.mock_data,
    "data.split_rule": lambda c: not c.data.mock_data,
}
# Fields with several spellings of one value.
_MEANING: dict[str, Callable[[Flags | Config], object]] = {
    "data.split": lambda c: _split(c)[0]  # the rest is for evaluation
}


def corpora_of(data: DataConfig) -> Corpora:
    """The identities of a run's corpora by the field that names them; none for mock data."""
    return {name: blend_identity(paths) for name in DATA_PATHS if (paths := getattr(data, name))}


def corpora_named(data: DataFlags) -> Corpora:
    """The corpora as far as a configuration alone says: prefixes and weights."""
    return {name: blend_of(paths) for name in DATA_PATHS if (paths := getattr(data, name))}


def differing(rule: Rule, there: Flags | Config, here: Config, known: frozenset[str]) -> list[str]:
    """Each difference as ``--flag there, here``.

    Args:
        there, here: the checkpoint's configuration and this run's.
        known: the fields that the checkpoint says.
    """
    return [
        _difference(name, there, here)
        for name, its_rule in RULES.items()
        if its_rule is rule and name in known and not _same(name, there, here)
    ]


def other_corpora(there: Corpora, here: Corpora) -> Iterator[str]:
    """Differences of two runs' training corpora, wherever the files lie. Neither may be mock data."""
    (former_flag, former), (flag, found) = _training(there), _training(here)
    if len(former) != len(found):
        yield f"{former_flag} {len(former)} corpora there, {flag} {len(found)} here"
        return
    for number, (old, new) in enumerate(zip(former, found, strict=True), 1):
        if any(key in old and old[key] != new[key] for key in ("sequences", "tokens", "sha256")):
            alike = " of the same size with other contents" if _size(old) == _size(new) else ""
            yield f"corpus {number} of {flag} {_shown(old)} there, {_shown(new)}{alike} here"
        if not _same_weight(old["weight"], new["weight"]):
            yield f"the weight of corpus {number} of {flag} {_weight(old)} there, {_weight(new)} here"


def unidentified_corpora(there: Corpora, here: Corpora) -> Iterator[str]:
    """Corpora that a checkpoint names by their place alone, and that are somewhere else now."""
    (_, former), (flag, found) = _training(there), _training(here)
    for old, new in zip(former, found, strict=False):
        if "sha256" not in old and old["prefix"] != new["prefix"]:
            yield f"{flag} {old['prefix']} there, {new['prefix']} here"


def reshuffled(config: Config, corpora: Corpora, samples_there: float, samples_here: float) -> bool:
    """Whether another length of the run puts the samples in another order.

    A corpus that is read more than once has its epochs shuffled together, as in Megatron; how many there are follows
    from the run's length. In a blend without weights each is read once.
    """
    _, found = _training(corpora)
    if samples_there == samples_here or (len(found) > 1 and found[0]["weight"] is None):
        return False
    longest = max(samples_there, samples_here) * config.model.seq_length * SURPLUS
    share = _split(config)[0]
    return any(longest * (corpus["weight"] or 1.0) >= corpus["tokens"] * share for corpus in found)


def other_evaluation(there: Flags, corpora_there: Corpora, here: Config, corpora_here: Corpora) -> Iterator[str]:
    """Differences after which losses of evaluations are not comparable with those before."""
    for name in ("valid_data_path", "test_data_path"):
        old, new = ([_identity(corpus) for corpus in found.get(name, [])] for found in (corpora_there, corpora_here))
        if old and new and old != new:
            yield f"{flag_name(name)} other corpora there than here"
    old_split, new_split = _split(there), _split(here)
    if old_split != new_split and old_split[0] == new_split[0] and there.data.data_path and here.data.data_path:
        yield _difference("data.split", there, here)


def _identity(corpus: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(corpus.get(key) for key in ("sequences", "tokens", "sha256"))


def _split(config: Flags | Config) -> tuple[float, ...]:
    return normalized_split(config.data.split or SPLIT) if config.data.data_path else (1.0,)


def _training(corpora: Corpora) -> tuple[str, list[dict[str, Any]]]:
    """The flag and the corpora that are trained on."""
    name = "train_data_path" if "train_data_path" in corpora else "data_path"
    return flag_name(name), corpora.get(name, [])


def _size(corpus: dict[str, Any]) -> tuple[int, int]:
    return corpus["sequences"], corpus["tokens"]


def _shown(corpus: dict[str, Any]) -> str:
    return f"{corpus['prefix']} ({corpus['sequences']:,} sequences, {corpus['tokens']:,} tokens)"


def _weight(corpus: dict[str, Any]) -> str:
    return "none" if corpus["weight"] is None else f"{corpus['weight']:.6g}"


def _same_weight(old: float | None, new: float | None) -> bool:
    return old == new if old is None or new is None else math.isclose(old, new, rel_tol=1e-9)


def _same(name: str, there: Flags | Config, here: Config) -> bool:
    matters = _MATTERS.get(name)
    if matters is not None and not (matters(there) and matters(here)):
        return True
    value = _MEANING.get(name, lambda config: config.value(name))
    return value(there) == value(here)


def _difference(name: str, there: Flags | Config, here: Config) -> str:
    flag, its_value = as_typed(name, there)
    return f"{flag} {its_value} there, {as_typed(name, here)[1]} here"


def as_typed(name: str, config: Flags | Config) -> tuple[str, str]:
    """(the flag, its value in words) of a field, ``section.field``."""
    section, field = name.split(".")
    spec = next(f for f in dataclasses.fields(getattr(config, section)) if f.name == field)
    off = spec.metadata.get("off")
    value = config.value(name)
    if isinstance(value, bool):
        shown = "given" if value is not bool(off) else "not given"
    elif isinstance(value, tuple):
        shown = " ".join(map(str, value))
    else:
        shown = "not given" if value is None else str(value)
    return _FOLLOWS_FROM.get(name) or off or flag_name(field), shown
