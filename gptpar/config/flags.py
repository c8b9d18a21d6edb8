"""The command line, generated from the configuration's dataclasses.

Names and meanings are Megatron-LM's. Nothing stops at the first mistake: unknown flags, values that do not parse and
unknown words are collected, so that the caller can report them together with every other problem.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Flags
from gptpar.config.compat import ACCEPTED, ANY, DENSE, EXPERTS, NO_EXPERTS, PLANNED
from gptpar.config.deepspeed import read_deepspeed
from gptpar.config.derive import Derived, expand_preset
from gptpar.config.fields import flag_name
from gptpar.errors import ConfigError
from gptpar.system.command_line import Parser, Unread

MAX_ECHOED = 80
"""Characters of a refused value that are repeated in its sentence."""


@dataclass
class ParsedFlags:
    """A command line, read.

    Attributes:
        flags: what it says; fields with a problem keep their default.
        problems: one sentence for each mistake.
        given: the fields that were set, as ``section.field``.
        refused: the fields whose values could not be read.
        derived: those of them that --deepspeed_config set.
        without_effect: what is understood of other programs but changes nothing, each with the reason.
        rest: values of the extra flags a verb declares beyond the configuration's.
    """

    flags: Flags
    problems: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    derived: list[Derived] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    rest: argparse.Namespace = field(default_factory=argparse.Namespace)


@dataclass(frozen=True)
class _Kind:
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
    def of(hint: Any) -> _Kind:
        """From a field's annotation, such as ``int | None`` or ``float | Literal["auto"]``."""
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        parts = [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]
        literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
        words = tuple(word for literal in literals for word in typing.get_args(literal))
        kind = next(part for part in parts if part not in literals)
        several = typing.get_origin(kind) is tuple
        return _Kind(typing.get_args(kind)[0] if several else kind, several, words)


def _reader(name: str, kind: _Kind, spec: dataclasses.Field[Any], problems: list[str]) -> Any:
    """A converter for argparse that notes a bad value, and returns ``None`` for it, instead of stopping."""

    def read(text: str) -> Any:
        try:
            return _value_of(text, kind, spec.metadata)
        except ValueError as error:
            problems.append(f"{name} {text[:MAX_ECHOED]}".strip() + f": {error}.")
            return None

    return read


def _value_of(text: str, kind: _Kind, rules: Any) -> Any:
    """What the words of a flag mean.

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
        return _whole(text)
    if kind.scalar is float:
        return _number_or_word(text, kind.words, rules) if kind.words else _number(text)
    return text


def _whole(text: str) -> int:
    """A whole number, which may be written as 5e8."""
    try:
        return int(text) if text.strip().lstrip("+-").isdigit() or not float(text).is_integer() else int(float(text))
    except ValueError:
        raise ValueError("a whole number is needed") from None


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


def _add_field(group: Any, section: str, spec: dataclasses.Field[Any], hint: Any, problems: list[str]) -> None:
    kind = _Kind.of(hint)
    meta = spec.metadata
    names = [flag_name(spec.name), *(n for n in meta["names"] if n != flag_name(spec.name))]
    common: dict[str, Any] = {"dest": f"{section}.{spec.name}", "default": argparse.SUPPRESS}
    if kind.scalar is bool:
        if meta["off"]:
            group.add_argument(meta["off"], action="store_false", help=meta["help"], **common)
        else:
            group.add_argument(*names, action="store_true", help=meta["help"], **common)
        return
    text = meta["help"]
    if meta["choices"]:
        text += f" ({', '.join(meta['choices'])})"
    if spec.default not in (None, dataclasses.MISSING):
        text += f" (default: {spec.default:.10g})" if kind.scalar is float else f" (default: {spec.default})"
    metavar = meta["metavar"] or {int: "N", float: "X"}.get(kind.scalar, "WORD")
    nargs = "+" if kind.several else None
    reader = _reader(names[0], kind, spec, problems)
    group.add_argument(*names, type=reader, nargs=nargs, metavar=metavar, help=text.replace("%", "%%"), **common)


def make_parser(prog: str, description: str, problems: list[str]) -> Parser:
    """A parser with every configuration flag, one group a section."""
    parser = Parser(problems=problems, prog=prog, description=description, formatter_class=argparse.HelpFormatter)
    for section in dataclasses.fields(Flags):
        kind = type(getattr(Flags(), section.name))
        hints = typing.get_type_hints(kind)
        title = (kind.__doc__ or section.name).strip().splitlines()[0]
        group = parser.add_argument_group(section.name, title)
        own_first = sorted(dataclasses.fields(kind), key=lambda spec: spec.name not in vars(kind)["__annotations__"])
        for spec in own_first:
            if spec.metadata:
                _add_field(group, section.name, spec, hints[spec.name], problems)
    return parser


def _unknown(words: Sequence[str], parser: Parser, parsed: ParsedFlags) -> None:
    """Sort words that no flag took: accepted, planned, or a mistake with its nearest match."""
    i = 0
    while i < len(words):
        name, _, glued = words[i].partition("=")
        i += 1
        values = [glued] if glued else []
        while i < len(words) and not words[i].startswith("--"):
            values.append(words[i])
            i += 1
        if name in ACCEPTED:
            wanted, why = ACCEPTED[name]
            parsed.without_effect.append(f"{name}: {why}")
            if len(values) != wanted:
                parsed.problems.append(f"{name} takes {wanted} value(s), {len(values)} given.")
        elif name in DENSE or name.startswith(EXPERTS):
            _experts(name, values, parsed)
        elif name in PLANNED:
            parsed.problems.append(f"{name}: {PLANNED[name]} is not part of this version yet; leave it out.")
        elif name.startswith("-"):
            near = parser.nearest(name, [*ACCEPTED, *DENSE])
            hint = f"; did you mean {near}?" if near else "; see --help for the flags there are."
            parsed.problems.append(f"unknown flag {name}{hint}")
            if "." in (meant := parser.dest_of(near)):  # what was meant is not missing as well
                parsed.refused.add(meant)
        else:
            parsed.problems.append(f"unexpected word {name!r}; values follow a flag.")


def _experts(name: str, values: Sequence[str], parsed: ParsedFlags) -> None:
    """A flag for mixture-of-experts may say only what a dense model is."""
    dense = DENSE.get(name, ())
    if dense is ANY or (values and all(value in dense for value in values)):
        parsed.without_effect.append(f"{name}: {NO_EXPERTS}")
        return
    said = " ".join([name, *values])
    only = f"; {' or '.join(dense)} alone, a dense model, is accepted" if dense else ""
    parsed.problems.append(
        f"{said[:MAX_ECHOED]}: {NO_EXPERTS}, and a dense model trained in its place would be another model: leave it "
        f"out{only}."
    )


def parse_flags(
    argv: Sequence[str],
    *,
    prog: str = "gptpar pretrain",
    description: str = "",
    extra: typing.Callable[[argparse.ArgumentParser], None] | None = None,
) -> ParsedFlags:
    """Read a command line.

    Args:
        argv: the words after the verb.
        extra: adds a verb's own flags to the parser; their values are returned in ``rest``.

    Raises:
        ConfigError: a flag without its value, which leaves the rest of the line unread.
    """
    parsed = ParsedFlags(Flags())
    parser = make_parser(prog, description, parsed.problems)
    if extra is not None:
        extra(parser)
    try:
        found, unknown = parser.parse_known_args(list(argv))
    except Unread:  # nothing after that word was read, so it would all seem to be missing
        raise ConfigError(parsed.problems) from None
    _unknown(unknown, parser, parsed)
    values: dict[str, dict[str, Any]] = {}
    for key, value in vars(found).items():
        if "." not in key:
            setattr(parsed.rest, key, value)
        elif value is None or (isinstance(value, list) and None in value):  # a problem was told
            parsed.refused.add(key)
        else:
            section, name = key.split(".")
            values.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
            parsed.given.add(key)
    for section, fields in values.items():
        parsed.flags = parsed.flags.update(section, **fields)
    parsed.flags, parsed.derived = expand_preset(parsed.flags, parsed.given)
    _read_file(parsed)
    return parsed


def _read_file(parsed: ParsedFlags) -> None:
    """Fill what the command line leaves open from the DeepSpeed configuration that it names."""
    file = read_deepspeed(parsed.flags, parsed.given)
    parsed.flags = file.flags
    parsed.given |= file.given
    parsed.derived += file.derived
    parsed.problems += file.problems
    parsed.without_effect += file.without_effect
