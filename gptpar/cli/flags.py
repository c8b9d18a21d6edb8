"""Makes the verbs' parsers from ``flags.toml``, which has their descriptions, groups and flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from string import Template
from typing import Any

from gptpar.system.command_line import Parser, not_empty, not_negative_int, positive_float, positive_int
from gptpar.system.files import facts_in

FACTS: dict[str, dict[str, Any]] = facts_in("flags.toml", __file__)
_TYPES = {
    one.__name__: one for one in (int, float, str, Path, not_empty, not_negative_int, positive_float, positive_int)
}


def parser_of(verb: str, **facts: Any) -> Parser:
    """A verb's parser.

    Args:
        verb: as the file names it, such as ``plan --module``.
        facts: the values of the file's ``$`` names: types, choices, and parts of help texts.
    """
    texts = {name: _filled(text, facts) for name, text in FACTS[verb].items() if isinstance(text, str)}
    parser = Parser(prog=f"gptpar {verb}", **texts)
    add_flags(parser, verb, **facts)
    return parser


def add_flags(parser: argparse.ArgumentParser, verb: str, **facts: Any) -> None:
    """Add a verb's groups of flags to a parser; see :func:`parser_of`."""
    for title, flags in FACTS[verb].items():
        if isinstance(flags, str):
            continue
        group: Any = parser if title == "flags" else parser.add_argument_group(title, flags.get("description"))
        either: Any = None
        for name, keywords in flags.items():
            if name == "description":
                continue
            options = {key: _filled(value, facts) for key, value in keywords.items() if key != "either"}
            if "type" in options:
                options["type"] = _TYPES.get(options["type"], options["type"])
            if "either" in keywords:
                either = either or group.add_mutually_exclusive_group(required=True)
            (either if "either" in keywords else group).add_argument(*name.split(), **options)


def _filled(value: Any, facts: dict[str, Any]) -> Any:
    """If the whole text is one ``$`` name, return its value, of any type; otherwise substitute inside the text."""
    if not isinstance(value, str) or "$" not in value:
        return value
    return facts[value[1:]] if value[1:] in facts else Template(value).substitute(facts)
