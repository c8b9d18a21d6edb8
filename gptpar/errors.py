"""The errors meant for the user: the command line prints the message alone, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeGuard


class GptparError(Exception):
    """Base of every error that says what is wrong, with the numbers, and what to do about it.

    Attributes:
        is_accident: whether the same command may succeed when it is given again.
        exit_status: exit status of a command that ends with this error.
    """

    is_accident = False
    exit_status = 1


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether an argument is a whole number, of Python's type or another library's; ``True`` is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def wrong_type(name: str, value: object, needed: str) -> str:
    """A sentence for an argument of the wrong type.

    Args:
        needed: the second half of the sentence: what is needed in its place.
    """
    return f"{name} is of type {type(value).__name__}: {needed}."


class ProblemsError(GptparError):
    """A list of all problems of what a user gave, raised at once.

    Args:
        problems: one sentence each, with the offending numbers or names and a remedy.
    """

    given = ""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(f"{self.given} has {count}:\n{numbered(problems)}")

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class ConfigError(ProblemsError, ValueError, AssertionError):
    """A list of all problems of a configuration; DeepSpeed raises a ValueError or asserts, as the problem may be."""

    given = "the configuration"


class ModelError(ProblemsError):
    """A list of all reasons why a model cannot be trained as it is."""

    given = "the model"


class ArgumentError(GptparError, ValueError):
    """An argument of a call that cannot be; torch and DeepSpeed raise a ValueError, too."""


class UsageError(GptparError, AssertionError):
    """A verb that was called where it cannot be; DeepSpeed asserts that, too."""


class DataError(GptparError):
    """A corpus, index file or data set that cannot be used as asked."""


class TokenizerError(GptparError):
    """A tokenizer that cannot be built, or text it cannot represent."""


class CheckpointError(GptparError):
    """A checkpoint that cannot be written or read."""


class DifferentTagsError(CheckpointError, AssertionError):
    """Processes that save one checkpoint under different names; DeepSpeed's error is an AssertionError, too."""


class UnusedParametersError(GptparError, AssertionError):
    """Parameters without a gradient where each has to have one; DeepSpeed's error is an AssertionError, too."""


class NotSavedError(CheckpointError):
    """The newest state of a run that ends is not on the disk.

    Its exit status is that of errors of input and output in the BSDs' ``sysexits.h``.
    """

    exit_status = 74


class FolderTakenError(CheckpointError):
    """A folder of checkpoints that another run writes into; to try again would not help."""


class NativeBuildError(GptparError):
    """The C++ helper could not be compiled; holds the compiler's own message."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if there is no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """A stranger's text with control characters and line ends escaped, which could forge messages."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def numbered(problems: Sequence[str]) -> str:
    """The problems, a numbered line each."""
    return "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))


def missing_package(error: ModuleNotFoundError) -> str | None:
    """A sentence that names a package which is not installed, and the command that installs it.

    ``None``: what is missing is a module of gptpar's own.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "gptpar"):
        return None
    return f"gptpar needs the package {package}, which is not installed in {sys.prefix}: run pip install {package}."
