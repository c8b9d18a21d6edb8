"""The parser, exit codes, error output and surroundings of every command; suggests a flag for a typo."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any, NoReturn

from gptpar.errors import GptparError, missing_package, printable
from gptpar.system.activity import FOLDER_VARIABLE
from gptpar.system.restart import note_final
from gptpar.system.stop import STOP_SIGNALS, StopAtOnce, Stopped, handling

OTHERS_FIRST_SECONDS = 2.0
"""How long a worker other than the first waits before it prints its failure.

If the first fails, too, torchrun ends the others within this time; it looks every 0.1 s.
"""


class Unread(Exception):
    """The rest of a command line was not read: a flag lacks its value."""


class BadValue(Exception):
    """Raised by the type of an argument whose mistakes are collected: the value counts as ``None`` then.

    Args:
        text: the value.
        why: what is wrong with it.
    """

    def __init__(self, text: str, why: str):
        self.text, self.why = text, why
        super().__init__(f"{text}: {why}")


class Described(Exception):
    """Raised instead of reading a command line, if the caller asks which flags its parser has."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser
        super().__init__("a parser was described")


DESCRIBE = "--describe-flags"
"""The word of a command line that asks for :class:`Described`. It is for programs; people read ``--help``."""


def describe_if_asked(parser: argparse.ArgumentParser, words: Iterable[str] | None) -> None:
    """Hand out the parser if ``DESCRIBE`` is among the words.

    Raises:
        Described: it is.
    """
    if DESCRIBE in (sys.argv[1:] if words is None else words):
        raise Described(parser)


class Parser(argparse.ArgumentParser):
    """A parser that shows defaults, takes no abbreviations of flags, and names the flag nearest to a typo.

    Args:
        problems: a list that receives argparse's complaints, such as a missing value; :class:`Unread` is raised then.
            Without it, a complaint ends the program. Values that cannot be read (:class:`BadValue`) are listed, too,
            and reading goes on.
    """

    def __init__(self, *, problems: list[str] | None = None, **options: Any):
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._collects = problems is not None
        self.problems = [] if problems is None else problems
        # An empty word is mostly a shell variable that is not set. A flag that may be empty has ``type=str``.
        self.register("type", None, not_empty)
        self.register("type", Path, path)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        describe_if_asked(self, words)
        # Typos come first: argparse would report that the flag which was meant is missing.
        self._refuse([w for w in words if w.startswith("--") and w.split("=", 1)[0] not in self._option_string_actions])
        parsed, unknown = self.parse_known_args(args, namespace)
        self._refuse(unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        describe_if_asked(self, args)
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # type: ignore[misc]
        except BadValue as error:
            self.problems.append(f"{action.option_strings[0]} {error.text}".strip() + f": {error.why}.")
            return None

    def error(self, message: str) -> NoReturn:
        if not self._collects:
            super().error(printable(message))  # it may repeat a word with control characters
        self.problems.append(message.removeprefix("argument ") + ".")
        raise Unread

    @property
    def flags(self) -> Set[str]:
        """The names of its flags."""
        return self._option_string_actions.keys()

    def nearest(self, flag: str, others: Iterable[str] = (), cutoff: float = 0.6) -> str | None:
        """The flag, among this parser's and ``others``, that is most similar to a mistyped one."""
        known = [*self._option_string_actions, *others]
        return next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=cutoff)), None)

    def dest_of(self, flag: str | None) -> str:
        """Name under which this parser stores the value of one of its flags; empty for any other."""
        action = self._option_string_actions.get(flag or "")
        return "" if action is None else action.dest

    def _refuse(self, unknown: list[str]) -> None:
        meant = [self.nearest(argument.split("=", 1)[0]) for argument in unknown]
        if unknown:
            self.error(
                "; ".join(
                    f"unrecognized argument {argument}" + (f" (did you mean {near}?)" if near else "")
                    for argument, near in zip(unknown, meant, strict=True)
                )
            )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        # "(default: None)", "(default: False)" and "(default: )" tell a reader nothing.
        if action.default is None or action.default is False or action.default == "":
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def run(main: Callable[[list[str]], int], argv: list[str], end: Callable[[int], NoReturn] | None = None) -> int:
    """Call a verb's ``main`` and return its exit status.

    An error that the user can mend (a GptparError, a full disk, a folder without permission) is one message on stderr
    and status 1, or the error's own status. After a signal that asks to stop, the status is 128 plus its number.

    Args:
        end: ends a worker's process with the status of a verb that has returned. From the end of the verb's run on, no
            signal changes that status.
    """
    stop = StopAtOnce(ends_with_run=end is not None)
    # A background job of a shell ignores Ctrl-C from its start; that stays so.
    numbers = [n for n in STOP_SIGNALS if n != signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    try:
        with handling(stop, numbers):
            prepare_process()
            status = main(argv)
            sys.stdout.flush()
            if end is not None:
                end(status)
        return status
    except (Stopped, KeyboardInterrupt) as error:
        return _stopped(error.signal if isinstance(error, Stopped) else signal.SIGINT)
    except Exception as error:
        if stop.signal is not None:  # an extension module that was being imported has made another one of the exception
            return _stopped(stop.signal)
        return _failed(error)


@contextlib.contextmanager
def needed_packages() -> Iterator[None]:
    """A context for the imports of a script: it ends as a verb does if a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(_failed(error))


def _stopped(number: int) -> int:
    return _stop("interrupted" if number == signal.SIGINT else str(Stopped(number)), 128 + number)


def _failed(error: Exception) -> int:
    """Print an error that the user can mend, and return the status; raise any other error again."""
    if isinstance(error, GptparError):
        if not error.is_accident:
            note_final()
        return _fail(str(error), error.exit_status)
    if isinstance(error, ModuleNotFoundError) and (sentence := missing_package(error)) is not None:
        return _fail(sentence, 1)
    if isinstance(error, MemoryError):
        return _fail(f"this machine's memory is full{f': {error}' if str(error) else ''}", 1)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        message = "the system starts no more threads: raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
        return _fail(message, 1)
    if isinstance(error, BrokenPipeError):
        # The reader of our output (`| head`) is gone; what stdout still buffers must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if isinstance(error, OSError):
        return _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    raise error


def _stop(message: str, status: int) -> int:
    """Print the message in one worker only, since all were asked to stop; under a launcher, the launcher prints it."""
    return status if _local_rank() != 0 or FOLDER_VARIABLE in os.environ else _fail(message, status)


def _fail(message: str, status: int) -> int:
    """Print a failure, once if all workers fail alike: the first ends at once, and torchrun ends the others."""
    rank = _local_rank()
    if rank != 0:
        time.sleep(OTHERS_FIRST_SECONDS)
        message = f"local rank {rank}: {message}"
    with contextlib.suppress(OSError):  # the terminal may be gone
        # A message may quote what a stranger wrote; its own line ends are ours.
        escaped = "\n".join(map(printable, message.split("\n")))
        print(f"error: {escaped}", file=sys.stderr, flush=True)
    return status


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def not_empty(text: str) -> str:
    """An argparse type: any text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, perhaps by an unset shell variable: set it, or leave the flag out")
    return text


def path(text: str) -> Path:
    """An argparse type: a path that is not empty; Python would take an empty one for the current folder."""
    return Path(not_empty(text))


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def not_negative_int(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


MIN_OPEN_FILES = 64
"""A tiny run on one process opens 40 files and sockets at once."""

OPEN_FILES = 4096
"""More than corpora of many files and connections to many processes need."""


def prepare_process() -> None:
    """Prepare the process's surroundings: standard streams, working folder, number of open files.

    Raises:
        GptparError: the working folder was removed, or too few files may be open at once.
    """
    open_standard_streams()
    try:
        os.getcwd()
    except OSError:
        raise GptparError("the current folder was removed: change to another one (cd), and start again.") from None
    _require_open_files()


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that were closed.

    The next file that is opened would get a closed stream's number, and what libraries print would be written into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may know fewer letters than a path or a text has
        sys.stdout.reconfigure(errors="backslashreplace")


def _require_open_files() -> None:
    """Raise this process's limit of open files as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        raise GptparError(
            f"{soft} files may be open at once, and {MIN_OPEN_FILES} are needed: raise the limit "
            f"(ulimit -n {OPEN_FILES})."
        )
