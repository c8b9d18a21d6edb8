"""What every command-line tool shares: a parser that knows typos, and errors without tracebacks."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from gptpar.errors import GptparError


class Parser(argparse.ArgumentParser):
    """Shows defaults, takes no abbreviation of a flag, and names the flag nearest to a typo."""

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self._explain(argument) for argument in unknown))
        return parsed

    def _explain(self, argument: str) -> str:
        flag = argument.split("=", 1)[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"unrecognized argument {argument}" + (f" (did you mean {near[0]}?)" if near else "")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        # "(default: None)" and "(default: False)" tell a reader nothing.
        if action.default is None or action.default is False:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def run(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Call a verb's `main` and return its exit status; a GptparError's message goes to stderr (1), Ctrl-C is 130."""
    try:
        status = main(argv)
        sys.stdout.flush()
        return status
    except GptparError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # the reader of our output (`| head`) has left; what stdout still holds must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _fail(message: str, status: int) -> int:
    """Every worker fails alike when the fault is the user's, so one of them says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    return status


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value
