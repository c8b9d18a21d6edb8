"""``flag`` declares a field that becomes a command-line flag, and how its text is read; ``Notes`` fills open fields."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never, Self

from gptpar.system.command_line import BadValue
from gptpar.system.quantities import THOUSANDS, read_count

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # Python 3.13's, with a default

    from gptpar.config import Flags

    Open = TypeVar("Open", bound=None, default=Never, covariant=True)
else:
    Open = typing.TypeVar("Open", covariant=True)
"""What a field may be beside its values: ``None`` as typed (``Section[None]``), nothing in a complete ``Section``."""

T = typing.TypeVar("T")

MAX_ECHOED = 80
"""Characters of a refused value that are repeated in its sentence."""

MAX_WHOLE = 2**63 - 1
"""The largest whole number of torch and numpy."""
MAX_FLOAT = 3.4e38
"""The largest fp32 number: a larger rate or scale is infinite in the arithmetic that uses it."""

NEVER = 10**40
"""The largest interval: whoever wants no checkpoint or evaluation types a number of many digits."""


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    names: Sequence[str] = (),
    off: str | None = None,
    metavar: str | None = None,
    spellings: dict[str, str] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    counts: bool = False,
    complete: Any = None,
    before: str | None = None,
) -> Any:
    """A dataclass field that is also a flag; the flag's name is the field's with dashes.

    Args:
        default: value when the flag is absent. ``None`` means "to be derived" or "not used".
        choices: the accepted words, for a text field.
        names: further spellings of the flag, as other programs' users know it.
        off: for a field that is true by default: the flag that turns it off (see :func:`on_unless`).
        spellings: other programs' words for a choice, such as ``{"layernorm": "LayerNorm"}``.
        least: the smallest number that makes sense.
        above: the number must be more than this.
        most: the largest number that makes sense; without it, what 64 bits (a float: 32 bits) can hold.
        counts: whether it counts steps, samples or tokens, so that 1.5B may be written for 1,500,000,000.
        complete: value of an open field in the complete configuration, where nothing else says it.
        before: for a flag that only stands for others: the field that follows it in ``--help``; ``None``: it is behind
            the open fields.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "names": tuple(names),
        "off": off,
        "metavar": metavar,
        "spellings": spellings or {},
        "least": least,
        "above": above,
        "most": most,
        "counts": counts,
        "complete": complete,
        "before": before,
    }
    return dataclasses.field(default=default, metadata=metadata)


def on_unless(off: str, help: str) -> Any:
    """A field that is true unless the flag ``off`` is given; ``help`` says what that flag does."""
    return flag(True, help, off=off)


class Missing(str):
    """A problem that any flag named in it would solve; it is not reported where one of these flags was refused."""


def as_word(value: object) -> str:
    """A value as it is typed: 1.0 is 1."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def flag_name(field_name: str) -> str:
    """``hidden_size`` -> ``--hidden-size``."""
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True)
class FlagKind:
    """The values that a flag takes.

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
        """Read the kind from a field's annotation, such as ``int | None`` or ``float | Literal["auto"]``."""
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
        spec: the field; its metadata are what :func:`flag` keeps.
        kind: what it takes.
    """

    section: str
    spec: dataclasses.Field[Any]
    kind: FlagKind

    @property
    def key(self) -> str:
        """``section.field``."""
        return f"{self.section}.{self.spec.name}"

    def read(self, text: str) -> Any:
        """The value that a word of the command line means.

        Raises:
            BadValue: it means none.
        """
        try:
            return value_of(text, self.kind, self.spec.metadata)
        except ValueError as error:
            raise BadValue(text[:MAX_ECHOED], str(error)) from None


def is_open(spec: dataclasses.Field[Any]) -> bool:
    """Whether a field may be ``None`` as typed, and not in the complete configuration."""
    return str(spec.type).endswith("| Open")


def completed(kind: type[T], flags: object) -> T:
    """A complete section, without the flags that stand for others; open fields get their ``complete`` values.

    Raises:
        TypeError: one has none.
    """
    specs = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {spec.name: getattr(flags, spec.name) for spec in specs}
    for spec in specs:
        if values[spec.name] is None and is_open(spec):
            values[spec.name] = spec.metadata.get("complete")
            if values[spec.name] is None:
                raise TypeError(f"{spec.name} must be known")
    return kind(**values)


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a section's fields as typed."""
    return typing.get_type_hints(kind, localns={"Open": None})


def fields_of(section: str, kind: type[Any]) -> list[FlagField]:
    """The flags of a section's dataclass: open ones first, with those that stand for others, then the rest."""
    hints = hints_of(kind)
    return [FlagField(section, spec, FlagKind.of(hints[spec.name])) for spec in _in_order(kind) if spec.metadata]


def _in_order(kind: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    own = vars(kind)["__annotations__"] if dataclasses.is_dataclass(kind.__base__) else ()
    specs = [spec for spec in dataclasses.fields(kind) if spec.name not in own]
    aliases = [spec for spec in dataclasses.fields(kind) if spec.name in own]
    for spec in filter(is_open, specs):
        yield from (alias for alias in aliases if alias.metadata["before"] == spec.name)
        yield spec
    yield from (alias for alias in aliases if alias.metadata["before"] is None)
    yield from itertools.filterfalse(is_open, specs)


def add_flags(parser: argparse.ArgumentParser, section: str, kind: type[Any]) -> None:
    """Add the flags of a section's dataclass to a parser, as a group of their own."""
    group = parser.add_argument_group(section, (kind.__doc__ or section).strip().splitlines()[0])
    for one in fields_of(section, kind):
        spec, scalar = one.spec, one.kind.scalar
        meta, own = spec.metadata, flag_name(spec.name)
        names = [own, *(name for name in meta["names"] if name != own)]
        common: dict[str, Any] = {"dest": one.key, "default": argparse.SUPPRESS}
        if scalar is bool:
            if meta["off"]:
                group.add_argument(meta["off"], action="store_false", help=meta["help"], **common)
            else:
                group.add_argument(*names, action="store_true", help=meta["help"], **common)
            continue
        text = meta["help"]
        if meta["choices"]:
            text += f" ({', '.join(meta['choices'])})"
        if spec.default not in (None, dataclasses.MISSING):
            text += f" (default: {spec.default:.10g})" if scalar is float else f" (default: {spec.default})"
        common["metavar"] = meta["metavar"] or {int: "N", float: "X"}.get(scalar, "WORD")
        nargs = "+" if one.kind.several else None
        group.add_argument(*names, type=one.read, nargs=nargs, help=text.replace("%", "%%"), **common)


def value_of(text: str, kind: FlagKind, rules: Any) -> Any:
    """Read the words of a flag.

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
        return read_count(text) if rules["counts"] and text[-1:].upper() in THOUSANDS else _whole(text)
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


def range_problem(value: Any, limits: Any) -> str:
    """A part of a sentence if a number, or one of several, is out of its field's range; else an empty text.

    Args:
        limits: the field's metadata.
    """
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        most = limits["most"] or (MAX_WHOLE if isinstance(number, int) else MAX_FLOAT)
        if limits["least"] is not None and not number >= limits["least"]:  # so that NaN is reported, too
            return f"is {_short(number)}; it must be at least {limits['least']}"
        if limits["above"] is not None and not number > limits["above"]:
            return f"is {_short(number)}; it must be more than {limits['above']}"
        if not abs(number) <= most:
            return f"is {_short(number)}; {'its size' if number < 0 else 'it'} must be at most {most:,}"
    return ""


def _short(number: float) -> str:
    """A number of any size, in few characters."""
    huge = isinstance(number, int) and abs(number) > sys.float_info.max
    if huge:
        return f"a number of {len(str(abs(number)))} digits"
    return str(number) if isinstance(number, int) and abs(number) < 10**12 else f"{number:g}"


@dataclass(frozen=True)
class Derived:
    """A value nobody typed: its name, what it became, and why."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sections:
    """Sections by name. They are frozen: another value makes a new whole."""

    def update(self, section: str, **values: Any) -> Self:
        """A copy with new values for fields of one section."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def value(self, field: str) -> Any:
        """The value of a field, by its name ``section.field``."""
        section, name = field.split(".")
        return getattr(getattr(self, section), name)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with new values, by their fields' names ``section.field``."""
        sections: dict[str, dict[str, Any]] = {}
        for field, value in values.items():
            section, name = field.split(".")
            sections.setdefault(section, {})[name] = value
        return dataclasses.replace(
            self, **{name: dataclasses.replace(getattr(self, name), **new) for name, new in sections.items()}
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)


class Notes:
    """Fills fields that are ``None`` and remembers why. Checks come later, so a field that is needed may be missing."""

    def __init__(self, flags: Flags):
        self.flags = flags
        self.derived: list[Derived] = []

    def fill(self, section: str, name: str, value: object, reason: str) -> None:
        if self.flags.value(f"{section}.{name}") is None:
            self.replace(section, name, value, reason)

    def replace(self, section: str, name: str, value: object, reason: str) -> None:
        self.flags = self.flags.update(section, **{name: value})
        self.add(name.replace("_", " "), value, reason)

    def add(self, name: str, value: object, reason: str) -> None:
        """A value that has no field of its own."""
        self.derived.append(Derived(name, value, reason))

    def drop_zero(self, section: str, name: str) -> None:
        """An interval of 0 is none."""
        if self.flags.value(f"{section}.{name}") == 0:
            self.flags = self.flags.update(section, **{name: None})
            self.add(name.replace("_", " "), "none", "0 is off, as in Megatron")
