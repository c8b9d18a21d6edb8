"""Reads the configuration in a checkpoint's description: a stranger, or a later version, may have written it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptpar.config import Flags, ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.fields import MAX_WHOLE, hints_of, range_problem
from gptpar.config.sections.model import check_model, complete_model
from gptpar.config.sections.positions import LLAMA_3_CONTEXT
from gptpar.errors import CheckpointError, numbered

UNIONS = (types.UnionType, typing.Union)
_DERIVED = ("ffn_hidden_size", "num_query_groups", "kv_channels", "padded_vocab_size")
"""Fields of the model that a run derives, and a checkpoint must have."""


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's model, and the tokenizer that it was trained with.

    Attributes:
        path, meta: of the checkpoint; ``exchange/checkpoint_tokenizer.py`` says which files it may use.
    """

    model: ModelConfig
    tokenizer: TokenizerConfig
    path: Path
    meta: Mapping[str, Any]


def stored_model(path: Path, meta: dict[str, Any]) -> StoredModel:
    """The model and tokenizer with which text is made.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    wanted = {
        f"{section}.{spec.name}"
        for section, kind in (("model", ModelFlags), ("tokenizer", TokenizerConfig))
        for spec in dataclasses.fields(kind)
        if spec.name != "preset"  # what it stands for is stored
    }
    config, _, problems = stored_config(meta.get("config"), wanted)
    problems = problems or [f"config.model: {problem}" for problem in check_model(config)]
    problems = problems or [
        f"config.model.{name} is missing" for name in _DERIVED if getattr(config.model, name) is None
    ]
    rows, ids = config.model.padded_vocab_size, config.model.softmax_vocab_size
    if not problems and rows is not None and ids is not None and not 1 <= ids <= rows:
        problems = [wrong_value("config.model.softmax_vocab_size", ids, f"1 to {rows} rows")]
    if problems:
        raise unusable(
            path, problems, "Load it with the version that saved it, or take another one with --ckpt-step N."
        )
    return StoredModel(complete_model(config.model, config.tokenizer), config.tokenizer, path, meta)


def stored_config(values: object, wanted: Collection[str]) -> tuple[Flags, frozenset[str], list[str]]:
    """The fields of a stored configuration, those it has, and what is wrong with them; the others get defaults."""
    if not isinstance(values, dict):
        return Flags(), frozenset(), [wrong_value("config", values, "an object")]
    config, known, problems = Flags(), [], []
    for section in dict.fromkeys(name.partition(".")[0] for name in wanted):
        found = values.get(section, {})
        if not isinstance(found, dict):
            problems.append(wrong_value(f"config.{section}", found, "an object"))
            continue
        kind = type(getattr(config, section))
        names = [spec.name for spec in dataclasses.fields(kind)]
        asked = {name: found[name] for name in names if f"{section}.{name}" in wanted and name in found}
        wrong = [*_section_problems(kind, asked, section)]
        if section == "model":
            wrong += _unknown_options(found, names)
        problems += wrong
        if not wrong:
            asked |= _newer_names(found, wanted) if section == "model" else {}
            config = config.update(section, **{name: _as_tuples(value) for name, value in asked.items()})
            known += [f"{section}.{name}" for name in asked]
    return config, frozenset(known), problems


def _newer_names(found: Mapping[str, object], wanted: Collection[str]) -> dict[str, object]:
    """Fields of a model by their names in this version, where an older one's, or Megatron-LM's, are stored."""
    if "use_rope_scaling" not in found or found.get("rope_scaling_type") is not None:
        return {}
    on = found["use_rope_scaling"] is True
    context = found.get("original_max_position_embeddings") or LLAMA_3_CONTEXT
    newer = {"rope_scaling_type": "llama3" if on else None, "original_max_position_embeddings": context if on else None}
    return {name: value for name, value in newer.items() if {f"model.{name}", "model.use_rope_scaling"} & set(wanted)}


def _as_tuples(value: object) -> object:
    """JSON knows lists alone."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _section_problems(kind: type, asked: dict[str, object], section: str) -> Iterator[str]:
    """Problems of the fields of one section of the configuration."""
    hints = hints_of(kind)
    for spec in dataclasses.fields(kind):
        if spec.name in asked:
            yield from _field_problems(spec, hints[spec.name], asked[spec.name], section)


def _field_problems(spec: dataclasses.Field[Any], hint: Any, value: object, section: str) -> Iterator[str]:
    """Problems of one field of the configuration: its type, its range, its word."""
    name, limits = f"config.{section}.{spec.name}", spec.metadata
    if problem := next(problem_of(hint, value, name, negative=True), None):
        yield problem
    if problem or value is None or not limits:
        return
    values: list[Any] = value if isinstance(value, list) else [value]
    if limits["choices"] and not set(values) <= set(limits["choices"]):
        yield wrong_value(name, value, f"one of {', '.join(limits['choices'])}")
    if wrong := range_problem(tuple(values), limits):
        yield f"{name} {wrong}"


def _unknown_options(found: dict[str, Any], known: Collection[str]) -> Iterator[str]:
    """Options of a model that this version does not have; one that is off changes nothing."""
    for name in sorted(found.keys() - known):
        if found[name]:
            yield f"config.model holds {name!r} = {_brief(found[name])}, an option that this version does not know"


def problems_of(kind: type, values: object, where: str, negative: Sequence[str] = ()) -> Iterator[str]:
    """Problems of the stored fields of a dataclass: missing, unknown, or of another type."""
    if not isinstance(values, dict):
        yield wrong_value(where, values, "an object")
        return
    hints = typing.get_type_hints(kind)
    for name, hint in hints.items():
        if name in values:
            yield from problem_of(hint, values[name], f"{where}.{name}", negative=name in negative)
        elif not fits(None, hint):  # else: saved before there was such a field
            yield f"{where}.{name} is missing"
    for name in sorted(values.keys() - hints):
        yield f"{where} holds {name!r}, which this version does not know"


def problem_of(hint: Any, value: object, where: str, *, negative: bool = False) -> Iterator[str]:
    if not fits(value, hint):
        yield wrong_value(where, value, _expected(hint))
    elif not negative and isinstance(value, int | float) and value < 0:
        yield wrong_value(where, value, "at least 0")


def fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is one of an annotation's."""
    if typing.get_origin(hint) in UNIONS:
        return any(fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(fits(one, typing.get_args(hint)[0]) for one in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e300  # type: ignore[arg-type, operator]
    if hint is int:
        return type(value) is int and abs(value) <= MAX_WHOLE
    return type(value) is hint


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) in UNIONS:
        return _expected(next(one for one in typing.get_args(hint) if one is not types.NoneType))
    if typing.get_origin(hint) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}[hint]


def wrong_value(where: str, value: object, expected: str) -> str:
    return (
        f"{where} is {_brief(value)}, where {expected} belongs"
        if value is not None
        else (f"{where} is missing or null, where {expected} belongs")
    )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unusable(path: Path, problems: Sequence[str], remedy: str) -> CheckpointError:
    return CheckpointError(f"the meta of {path} is not that of a run of this version:\n{numbered(problems)}\n{remedy}")
