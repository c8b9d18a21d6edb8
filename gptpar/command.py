"""What every command-line tool shares: a parser that knows typos, and errors without tracebacks."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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


def run(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Exit with the status of a tool's `main`; a GptparError's message goes to stderr (1), Ctrl-C is 130."""
    try:
        status = main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except GptparError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # the reader of our output (`| head`) has left; what stdout still holds must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)


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
