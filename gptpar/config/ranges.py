"""Finds numbers beyond the limits that their flags declare. Pure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from gptpar.config import Flags
from gptpar.config.fields import flag_name

MAX_WHOLE = 2**63 - 1
"""What torch and numpy keep a whole number in."""
MAX_FLOAT = 3.4e38
"""What fits 32 bits: a larger rate or scale is infinite in the arithmetic that uses it."""
NUMBERS = (int, float, tuple)
"""Types of a field that is a number, or several."""


def out_of_range(flags: Flags, *, checked: Flags | None = None) -> dict[str, str]:
    """``section.field`` of each number that is too small or too large -> a part of a sentence that says so.

    Args:
        checked: flags without such numbers; sections that are the same are not looked at.
    """
    found = {}
    for section, fields in _limits():
        values = getattr(flags, section)
        if checked is not None and values is getattr(checked, section):
            continue
        for name, limits in fields:
            value = getattr(values, name)
            if type(value) in NUMBERS and (problem := _problem(value, limits)):
                found[f"{section}.{name}"] = problem
    return found


@cache
def _limits() -> list[tuple[str, list[tuple[str, Any]]]]:
    """(section, (field, its limits) of each flag) of each section."""
    sections = [(section.name, getattr(Flags(), section.name)) for section in dataclasses.fields(Flags)]
    return [
        (name, [(field.name, field.metadata) for field in dataclasses.fields(values) if field.metadata])
        for name, values in sections
    ]


def _problem(value: Any, limits: Any) -> str:
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        most = limits["most"] or (MAX_WHOLE if isinstance(number, int) else MAX_FLOAT)
        if limits["least"] is not None and not number >= limits["least"]:  # so that NaN is told, too
            return f"is {_short(number)}; it must be at least {limits['least']}"
        if limits["above"] is not None and not number > limits["above"]:
            return f"is {_short(number)}; it must be more than {limits['above']}"
        if not abs(number) <= most:
            return f"is {_short(number)}; it must be at most {most:,}"
    return ""


def _short(number: float) -> str:
    """A number of any size, in few characters."""
    huge = isinstance(number, int) and abs(number) > sys.float_info.max
    return f"a number of {len(str(abs(number)))} digits" if huge else f"{number:g}"


def range_problems(flags: Flags) -> list[str]:
    """One sentence for each number out of range."""
    return [f"{_flag(name)} {problem}." for name, problem in out_of_range(flags).items()]


def with_defaults(flags: Flags, names: Iterable[str]) -> Flags:
    """A copy whose fields named here (``section.field``) have their defaults again."""
    for name in names:
        section, field = name.split(".")
        flags = flags.update(section, **{field: getattr(getattr(Flags(), section), field)})
    return flags


def _flag(name: str) -> str:
    return flag_name(name.split(".")[1])
