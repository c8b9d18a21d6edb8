"""Reads the text of a flag's value, for command lines and files alike. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptpar.config import Flags
from gptpar.system.quantities import THOUSANDS, read_count


@dataclass(frozen=True)
class FlagKind:
    """What a flag takes.

    Attributes:
        scalar: the type of a value.
        several: whether it takes several values.
        words: what may stand in place of a number.
    """

    scalar: type
    several: bool
    words: tuple[str, ...]

    @staticmethod
    def of(hint: Any) -> FlagKind:
        """From a field's annotation, such as ``int | None`` or ``float | Literal["auto"]``."""
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        parts = [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]
        literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
        words = tuple(word for literal in literals for word in typing.get_args(literal))
        kind = next(part for part in parts if part not in literals)
        several = typing.get_origin(kind) is tuple
        return FlagKind(typing.get_args(kind)[0] if several else kind, several, words)


@dataclass(frozen=True)
class FlagField:
    """A field of ``Flags`` that is a flag.

    Attributes:
        section: its section's name.
        spec: the field; its metadata are what :func:`gptpar.config.fields.flag` keeps.
        kind: what it takes.
    """

    section: str
    spec: dataclasses.Field[Any]
    kind: FlagKind

    @property
    def key(self) -> str:
        """``section.field``."""
        return f"{self.section}.{self.spec.name}"


@functools.cache
def flag_fields() -> tuple[FlagField, ...]:
    """Every flag of the configuration, section by section, each section's own fields first."""
    found = []
    for section in dataclasses.fields(Flags):
        kind = type(getattr(Flags(), section.name))
        hints = typing.get_type_hints(kind)
        own_first = sorted(dataclasses.fields(kind), key=lambda spec: spec.name not in vars(kind)["__annotations__"])
        for spec in own_first:
            if spec.metadata:
                found.append(FlagField(section.name, spec, FlagKind.of(hints[spec.name])))
    return tuple(found)


def value_of(text: str, kind: FlagKind, rules: Any) -> Any:
    """What the words of a flag mean.

    Args:
        rules: the field's metadata.

    Raises:
        ValueError: why they mean nothing, as a part of a sentence.
    """
    if not text.strip():
        raise ValueError("an empty text was given, perhaps by an unset shell variable: set it, or leave the flag out")
    if rules["choices"]:
        word = rules["spellings"].get(text, text)
        if word not in rules["choices"]:
            raise ValueError(f"unknown; it takes one of {', '.join(rules['choices'])}")
        return word
    if kind.scalar is int:
        return _count(text) if rules["counts"] else _whole(text)
    if kind.scalar is float:
        return _number_or_word(text, kind.words, rules) if kind.words else _number(text)
    return text


def _whole(text: str) -> int:
    """A whole number, which may be written as 5e8."""
    try:
        return int(text) if text.strip().lstrip("+-").isdigit() or not float(text).is_integer() else int(float(text))
    except ValueError:
        raise ValueError("a whole number is needed") from None


def _count(text: str) -> int:
    """A whole number, which may be written as 1.5B, too."""
    return read_count(text) if text[-1:].upper() in THOUSANDS else _whole(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("a number is needed")
    return value


def _number_or_word(text: str, words: Sequence[str], rules: Any) -> float | str:
    """A number within its limits, or a word in its place."""
    if text in words:
        return text
    with contextlib.suppress(ValueError):
        if rules["least"] <= (value := _number(text)) <= rules["most"]:
            return value
    raise ValueError(f"a number from {rules['least']} to {rules['most']}, or {' or '.join(words)}, is needed")
