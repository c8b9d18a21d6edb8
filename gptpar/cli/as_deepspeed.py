"""``gptpar as-deepspeed -- COMMAND``: a command whose programs import ``deepspeed`` and get ``gptpar.deepspeed``."""

from __future__ import annotations

import importlib.machinery
import os
import site
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import gptpar
from gptpar.cli.flags import parser_of
from gptpar.errors import GptparError

PACKAGE = Path(gptpar.__file__).resolve().parent
STAND_IN = PACKAGE / "deepspeed" / "stand_in"
"""A folder for PYTHONPATH with the package and its description, and with a folder of commands for PATH."""


def main(argv: list[str]) -> NoReturn:
    """Become the command.

    Raises:
        GptparError: DeepSpeed is installed, or the command cannot be started.
    """
    parser = parser_of("as-deepspeed")
    own = list(takewhile(lambda word: word.startswith("-") and word != "--", argv))
    args = parser.parse_args(own)
    command = argv[len(own) :]
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        parser.error("a command is needed, for example: gptpar as-deepspeed -- accelerate launch train.py")
    if (other := installed()) and not args.replace:
        raise GptparError(
            f"DeepSpeed is installed at {other}: add --replace before the command to hide it there, or uninstall it."
        )
    environment = with_stand_in(os.environ)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise GptparError(
            f"{command[0]} cannot be started ({error.strerror}): give a program's name or path."
        ) from None


def installed() -> str:
    """The file of an installed DeepSpeed; empty if there is none."""
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() != STAND_IN]
    spec = importlib.machinery.PathFinder.find_spec("deepspeed", elsewhere)
    return "" if spec is None else spec.origin or "a folder without a file of its own"


def with_stand_in(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python finds the stand-in first, and a shell the command ``deepspeed``."""
    checkout = str(PACKAGE.parent)
    known = {str(Path(path).resolve()) for path in (*site.getsitepackages(), site.getusersitepackages())}
    paths = [str(STAND_IN), *([] if checkout in known else [checkout])]
    return {
        **environment,
        "PYTHONPATH": _before(environment.get("PYTHONPATH", ""), *paths),
        "PATH": _before(environment.get("PATH", os.defpath), str(STAND_IN / "bin")),
        "PYTHON": environment.get("PYTHON", sys.executable),
    }


def _before(former: str, *paths: str) -> str:
    rest = [path for path in former.split(os.pathsep) if path and path not in paths]
    return os.pathsep.join([*paths, *rest])
