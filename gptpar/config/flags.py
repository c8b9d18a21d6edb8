"""Makes the command-line parser from the configuration's dataclasses, and reads the flags.

Names and meanings are Megatron-LM's. Nothing stops at the first mistake: unknown flags, values that do not parse and
unknown words are collected, so that the caller can report them together with every other problem.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from gptpar.config import DeepSpeedFlags, Flags, flag_fields
from gptpar.config.deepspeed import read_deepspeed
from gptpar.config.elsewhere import OF_THE_LAUNCH, dashed, elsewhere
from gptpar.config.fields import Derived, add_flags, as_word, flag_name
from gptpar.config.parsed import ParsedFlags
from gptpar.config.run_file import read_run_file
from gptpar.config.sections.mlp import choose_gelu
from gptpar.config.sections.model import expand_preset
from gptpar.errors import ConfigError
from gptpar.system.command_line import Parser, Unread

CONFIG_HELP = (
    "TOML file with flags as keys, flat or in sections; the command line wins over it. A run writes one into its "
    "--save folder, config.toml, which repeats it"
)
CLOSE_ENOUGH = 0.75
"""Least likeness (0 to 1) of a mistyped flag and a known one, and of each of their words."""
SHORTEST_MISTYPED = 5
"""Fewest letters of a word that counts as mistyped. A shorter word that differs means something else."""


def keys_of_model() -> set[str]:
    """The fields of the model and the tokenizer, as ``section.field``."""
    return {one.key for one in flag_fields() if one.section in ("model", "tokenizer")}


@cache
def _every_flag() -> argparse.ArgumentParser:
    """A parent of parsers with every configuration flag, one group a section.

    Making the flags takes 2 ms, longer than reading a command line.
    """
    parent = argparse.ArgumentParser(add_help=False)
    for section in dataclasses.fields(Flags):
        add_flags(parent, section.name, type(getattr(Flags(), section.name)))
    return parent


def _with_dashes(word: str, known: Set[str]) -> str:
    """A flag of the parser's, or of other programs', that was written with underscores, or "disable" in place of "no".

    Megatron-LM makes both of a switch that is on.
    """
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name in known or name in elsewhere().names:
        return word
    for other in (dashed(name), dashed(name).replace("--disable-", "--no-", 1)):
        if other in known or other in elsewhere().names:
            return other + equals + value
    return word


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
        if name.startswith("-"):
            _known_elsewhere(name, values, parser, parsed)
        else:
            found = [name if not glued else f"{name}={glued}", *values[1 if glued else 0 :]]
            parsed.problems.append(
                f"unexpected word{'s' * (len(found) > 1)} {', '.join(map(repr, found))}; values follow a flag."
            )


def _known_elsewhere(name: str, values: Sequence[str], parser: Parser, parsed: ParsedFlags) -> None:
    """Answer a flag that is not gptpar's."""
    said = " ".join([name, *values])
    if {name, said} & elsewhere().stands_for.keys():
        _stands_for(said, values, parsed)
    elif answer := elsewhere().answer(name):
        without_effect, problems = answer.to(name, values)
        parsed.without_effect += without_effect
        parsed.problems += problems
        if name in OF_THE_LAUNCH:
            parsed.launched[name] = " ".join(values)
    else:
        near = elsewhere().meant.get(dashed(name)) or _mistyped(name, parser)
        hint = f"; did you mean {near}?" if near else "; see --help for the flags there are."
        parsed.problems.append(f"unknown flag {name}{hint}")
        if "." in (meant := parser.dest_of(near)):  # what was meant is not missing as well
            parsed.refused.add(meant)


def _mistyped(name: str, parser: Parser) -> str | None:
    """The flag that a mistyped one was meant to be: both have the same words, but for letters of longer words.

    A flag with a word more, or without its "no", asks for something else.
    """
    near = parser.nearest(name, elsewhere().names, CLOSE_ENOUGH)
    if near is None:
        return None
    mine, theirs = (dashed(flag.strip("-")).split("-") for flag in (name, near))
    same_words = len(mine) == len(theirs) and all(map(_is_mistyped_word, mine, theirs))
    return near if same_words or "".join(mine) == "".join(theirs) else None


def _is_mistyped_word(word: str, known: str) -> bool:
    """Whether two words are one but for letters; a short one may lack a letter: fp4 is not fp64, nor dion lion."""
    if min(len(word), len(known)) >= SHORTEST_MISTYPED:
        return difflib.SequenceMatcher(None, word, known).ratio() >= CLOSE_ENOUGH
    short, long = sorted((word, known), key=len)
    without_one = [long[:i] + long[i + 1 :] for i in range(len(long)) if long[i].isalpha()]
    return word == known or short in without_one


def _stands_for(said: str, values: Sequence[str], parsed: ParsedFlags) -> None:
    """Read a flag as another one, unless that one is typed, too, with another value."""
    if said not in elsewhere().stands_for:
        parsed.problems.append(f"{said.split()[0]} takes 0 value(s), {len(values)} given.")
        return
    key, value = elsewhere().stands_for[said]
    field_name = key.partition(".")[2]
    typed = parsed.typed.setdefault(key, value)
    if typed == value:
        parsed.derived.append(Derived(field_name.replace("_", " "), value, said))
        return
    meant = flag_name(field_name)
    parsed.problems.append(
        f"{said} means {meant} {as_word(value)}, and {meant} {as_word(typed)} is given, too: keep one."
    )


def parse_flags(
    argv: Sequence[str],
    *,
    prog: str = "gptpar pretrain",
    description: str = "",
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    takes_config: bool = True,
) -> ParsedFlags:
    """Read a command line.

    Args:
        argv: the words after the verb.
        extra: adds a verb's own flags to the parser; their values are returned in ``rest``.
        takes_config: whether ``--config`` is a flag.

    Raises:
        ConfigError: a flag without its value, which leaves the rest of the line unread.
    """
    parsed = ParsedFlags(Flags())
    parser = Parser(
        problems=parsed.problems,
        parents=[_every_flag()],
        prog=prog,
        description=description,
        formatter_class=argparse.HelpFormatter,
    )
    if takes_config:
        parser.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help=CONFIG_HELP)
    if extra is not None:
        extra(parser)
    known = parser.flags
    try:
        found, unknown = parser.parse_known_args([_with_dashes(word, known) for word in argv])
    except Unread:  # nothing after that word was read, so it would all seem to be missing
        raise ConfigError(parsed.problems) from None
    for key, value in vars(found).items():
        if "." not in key:
            setattr(parsed.rest, key, value)
        elif value is None or (isinstance(value, list) and None in value):  # a problem is noted
            parsed.refused.add(key)
        else:
            parsed.typed[key] = tuple(value) if isinstance(value, list) else value
    _unknown(unknown, parser, parsed)
    _read_config(vars(parsed.rest).pop("config", None), parsed)
    for key, value in parsed.typed.items():
        section, name = key.split(".")
        parsed.flags = parsed.flags.update(section, **{name: value})
    parsed.given |= parsed.typed.keys()
    _read_data_files(parsed)
    for fill in (expand_preset, choose_gelu):
        parsed.flags, derived = fill(parsed.flags, parsed.given)
        parsed.derived += derived
    if parsed.flags.deepspeed != DeepSpeedFlags():
        read_deepspeed(parsed)
    return parsed


def _read_config(path: str | None, parsed: ParsedFlags) -> None:
    """Fill what the command line leaves open from the file that ``--config`` names."""
    if path is None:
        return
    file = read_run_file(path)
    typed = parsed.typed.keys() | parsed.refused
    parsed.from_config = file.values.keys() - typed
    parsed.typed |= {key: file.values[key] for key in file.values if key in parsed.from_config}
    parsed.refused |= file.refused - typed
    parsed.problems += file.problems


def _read_data_files(parsed: ParsedFlags) -> None:
    """Fill the paths of the data from the files that hold them."""
    data = parsed.flags.data
    found: dict[str, tuple[str, ...]] = {}
    for flag, path, names in (
        ("--data-args-path", data.data_args_path, ("data_path",)),
        ("--per-split-data-args-path", data.per_split_data_args_path, tuple(f"{split}_data_path" for split in SPLITS)),
    ):
        if path is None:
            continue
        if given := [flag_name(name) for name in names if f"data.{name}" in parsed.given]:
            parsed.problems.append(f"{flag} {path} holds the words of {given[0]}, which is given, too: keep one.")
            continue
        try:
            found |= {"data_path": read_data_args(path)} if flag == "--data-args-path" else read_split_data_args(path)
        except ValueError as error:
            parsed.problems.append(f"{flag} {path}: {error}.")
    parsed.flags = parsed.flags.update("data", **found)
    parsed.given |= {f"data.{name}" for name in found}
    parsed.derived += [Derived(name.replace("_", " "), " ".join(words), "its file") for name, words in found.items()]


SPLITS = ("train", "valid", "test")


def read_data_args(path: str) -> tuple[str, ...]:
    """The words of ``--data-args-path``: prefixes, or WEIGHT PREFIX pairs, over any number of lines.

    Raises:
        ValueError: there are none, as a part of a sentence.
    """
    words = tuple(_text(path).split())
    if not words:
        raise ValueError("it is empty: prefixes of data sets are needed")
    return words


def read_split_data_args(path: str) -> dict[str, tuple[str, ...]]:
    """The words of ``--per-split-data-args-path`` by field: a JSON object of lists, or of texts of words.

    Raises:
        ValueError: it is none, as a part of a sentence.
    """
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except RecursionError as error:
        raise ValueError(f"it is no JSON that can be read ({error})") from None
    if not isinstance(value, dict) or not {*SPLITS} >= value.keys() or "train" not in value:
        raise ValueError(f"a JSON object with {', '.join(SPLITS)} is needed")
    return {f"{split}_data_path": words for split in SPLITS if (words := _words(value.get(split), split))}


def _words(value: Any, split: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if value is None or isinstance(value, list):
        return tuple(map(str, value or ()))
    raise ValueError(f"{split} must be a list of words, or a text of them")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
