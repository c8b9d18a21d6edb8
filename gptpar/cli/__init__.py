"""The command line ``gptpar VERB ...``: the list of verbs."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from gptpar import __version__
from gptpar.cli.flags import FACTS
from gptpar.system.command_line import run

VERBS: dict[str, str] = FACTS["verbs"]
"""Verb -> what it does, in a few words; each has a module of its name in this package, with a function ``main``."""


def usage() -> str:
    """The verbs, one in each line."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    first = "usage: gptpar VERB [flags]; gptpar VERB --help lists a verb's flags, gptpar --version says the version"
    return "\n".join([first, "", *lines])


def main(argv: Sequence[str] | None = None, end: Callable[[int], NoReturn] | None = None) -> int:
    """Run a verb. Errors meant for the user are printed without a traceback.

    Args:
        end: see :func:`gptpar.system.command_line.run`.

    Returns:
        0 on success, 1 after an error, 2 for a wrong command line, 128 and the signal's number after a signal
        (130 after Ctrl-C).
    """
    words = without_local_rank(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help", "--version"):
        return run(_usage_or_version, words)
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no verb {words[0]!r}{hint}\n{usage()}", file=sys.stderr)
        return 2
    # A verb is imported inside `run`, because torch takes a second, in which the user may press Ctrl-C.
    module = f"{__name__}.{words[0].replace('-', '_')}"
    return run(lambda rest: importlib.import_module(module).main(rest), words[1:], end)


def _usage_or_version(words: Sequence[str]) -> int:
    print(f"gptpar {__version__}" if words[:1] == ["--version"] else usage())
    return 0 if words else 2


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """The words of a command line from the verb on: DeepSpeed's launcher puts ``--local_rank`` before it."""
    words = list(argv)
    while words and words[0].partition("=")[0] in ("--local_rank", "--local-rank"):
        del words[: 1 if "=" in words[0] else 2]
    return words
