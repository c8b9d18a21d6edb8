"""``gptpar completion SHELL``: makes a script of the verbs' own parsers, with which a shell completes words."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptpar.cli import VERBS
from gptpar.cli.flags import parser_of
from gptpar.config import flag_fields
from gptpar.errors import GptparError
from gptpar.system.command_line import DESCRIBE, Described


@dataclass(frozen=True)
class FlagWords:
    """A verb's flag.

    Attributes:
        name: with its dashes.
        takes_value: whether a value follows.
        choices: the words that it takes; empty if it takes any.
        help: what it does.
    """

    name: str
    takes_value: bool
    choices: tuple[str, ...]
    help: str


def main(argv: list[str]) -> int:
    """Print the script."""
    shell = parser_of("completion", scripts=SCRIPTS).parse_args(argv).shell
    print("\n".join(SCRIPTS[shell]({verb: list(flags_of(verb)) for verb in VERBS})))
    return 0


def flags_of(verb: str) -> Iterator[FlagWords]:
    """The flags that a verb's parser has.

    Raises:
        GptparError: the verb reads no words.
    """
    # Values of a configuration's flags are checked after argparse, so that all mistakes are reported at once.
    words_of = {one.key: one.spec.metadata["choices"] or one.kind.words for one in flag_fields()}
    for action in _parser_of(verb)._actions:
        choices = tuple(map(str, words_of.get(action.dest) or action.choices or ()))
        for name in action.option_strings:
            if name.startswith("--"):
                yield FlagWords(name, action.nargs != 0, choices, action.help or "")


def _parser_of(verb: str) -> argparse.ArgumentParser:
    try:
        importlib.import_module(f"gptpar.cli.{verb.replace('-', '_')}").main([DESCRIBE])
    except Described as described:
        return described.parser
    raise GptparError(f"gptpar {verb} has no parser")


def bash_script(flags: dict[str, list[FlagWords]]) -> Iterator[str]:
    """A function that bash calls for each word to complete."""
    values = (
        f'            "{verb} {flag.name}") words="{" ".join(flag.choices)}" ;;'
        for verb, own in flags.items()
        for flag in own
        if flag.choices
    )
    names = (f'            {verb}) words="{" ".join(flag.name for flag in own)}" ;;' for verb, own in flags.items())
    script = Path(__file__).with_name("completion.bash").read_text(encoding="utf-8").replace("@VERBS@", " ".join(flags))
    yield from script.replace("@VALUES@", "\n".join(values)).replace("@FLAGS@", "\n".join(names)).splitlines()


def zsh_script(flags: dict[str, list[FlagWords]]) -> Iterator[str]:
    """bash's function, through zsh's emulation of such functions."""
    yield "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
    yield from bash_script(flags)


def fish_script(flags: dict[str, list[FlagWords]]) -> Iterator[str]:
    """A line for each verb and each flag."""
    for verb, text in VERBS.items():
        yield f"complete -c gptpar -n __fish_use_subcommand -f -a {verb} -d {_quoted(text)}"
    for verb, own in flags.items():
        for flag in own:
            words = f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            seen = f"'__fish_seen_subcommand_from {verb}'"
            text = _quoted(" ".join(flag.help.replace("%%", "%").split()))
            yield f"complete -c gptpar -n {seen} -l {flag.name[2:]}{words} -d {text}"


def _quoted(text: str) -> str:
    """A word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
