"""Reads JSON with comments and trailing commas. Pure.

DeepSpeed reads more than that, for it parses with the hjson library: lines without commas, keys without quotes. Where
that library is installed it is asked last; guessing what it would make of a text is left to it.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
# A comma right after a bracket trails nothing: it is kept, so that it stays a mistake.
_TRAILING_COMMA = re.compile(rf"({_STRING}|[\[{{]\s*,)|,(?=\s*[\]}}])", re.DOTALL)


class JsonError(ValueError):
    """Text that is no JSON object, or says a key twice; the message is a part of a sentence."""


def read_object(text: str) -> dict[str, Any]:
    """Read one object. ``//``, ``#`` and ``/* */`` begin comments, and a comma may precede a closing bracket.

    What is no JSON even so is read by the hjson library, if there is one.

    Raises:
        JsonError: with line and column of a mistake, or all keys that are given twice.
    """
    repeated: list[str] = []

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                repeated.append(key)
            found[key] = value
        return found

    plain = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    if not plain.strip():
        raise JsonError("it is empty")
    try:
        value = json.loads(plain, object_pairs_hook=unique, parse_constant=infinity)
    except json.JSONDecodeError as error:
        loose = error.msg.startswith("Expecting") and plain[error.pos : error.pos + 1] not in ("", *",:]}")
        repeated.clear()
        value = _by_hjson(text, unique, f"line {error.lineno}, column {error.colno}: {error.msg}", loose=loose)
    except (RecursionError, ValueError) as error:  # too deep, not a number, a number of too many digits
        raise JsonError(str(error)) from None
    if repeated:
        raise JsonError(f"given twice in one object: {', '.join(repeated)}")
    if not isinstance(value, dict):
        raise JsonError("an object in braces is needed")
    return value


def _by_hjson(text: str, hook: Any, mistake: str, *, loose: bool) -> Any:
    """Read a text by the hjson library.

    Args:
        loose: whether hjson might read what is no JSON there; the error then names hjson if it is not installed.

    Raises:
        JsonError: with the mistake in the JSON, where there is no such library, or it can do no better.
    """
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        remedy = " (pip install 'gptpar[hjson]' reads what DeepSpeed's looser parser reads)"
        raise JsonError(f"{mistake}{remedy if loose else ''}") from None
    try:
        return hjson.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        raise JsonError(mistake) from None


def _blank(match: re.Match[str]) -> str:
    """Keep a string, and replace a comment by spaces, so that lines and columns of mistakes stay right."""
    return match[1] or re.sub(r"[^\n]", " ", match[0])


def infinity(word: str) -> float:
    """Read ``Infinity``, alone of the words that Python's JSON takes as numbers: a few keys may be without a limit."""
    if word != "Infinity":
        raise JsonError(f"{word} is not a number")
    return math.inf
