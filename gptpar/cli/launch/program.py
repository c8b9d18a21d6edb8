"""The program that workers run: a module, a script or an executable, in a new interpreter or in this one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NoReturn, cast

from gptpar.system.quiet_end import leave

LOCAL_RANK = "${local_rank}"
"""torchrun's text for a worker's number on its machine, in the program's arguments."""

Kind = Literal["module", "script", "executable"]

_RUN = f"from {__name__} import run_words; run_words()"
_RUNPY = "<frozen runpy>"


@dataclass(frozen=True)
class Program:
    """The program that a command line names after the launcher's own flags.

    Attributes:
        kind: what ``name`` is.
        name: a module as after ``python -m``, a script's path, or an executable.
        words: its arguments.
    """

    kind: Kind
    name: str
    words: tuple[str, ...]

    @property
    def is_gptpar(self) -> bool:
        """Whether the workers are gptpar's own, which note what they do as soon as there is something to save."""
        return self.kind == "module" and self.name == "gptpar"

    def command(self, environment: Mapping[str, str]) -> list[str]:
        """The command line of a process of its own. Output is unbuffered, as torchrun has it.

        A user's script or module ends as gptpar's own workers do, see :func:`~gptpar.system.quiet_end.leave`.

        Args:
            environment: of the process, with its LOCAL_RANK.
        """
        if self.kind == "executable":
            return [self.name, *self._words_of(environment)]
        start = ["-m"] if self.is_gptpar else ["-c", _RUN, self.kind]
        return [*interpreter(), *start, self.name, *self._words_of(environment)]

    def _words_of(self, environment: Mapping[str, str]) -> list[str]:
        return [word.replace(LOCAL_RANK, environment["LOCAL_RANK"]) for word in self.words]

    def run_here(self) -> None:
        """Run it as ``__main__`` of this process, which has only imported modules so far."""
        sys.argv = [self.name, *self._words_of(os.environ)]
        if self.kind == "module":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(self.name))
            runpy.run_path(self.name, run_name="__main__")

    def run_and_leave(self) -> NoReturn:
        """Run it here, and end this process with its status; an uncaught exception ends the process as usual."""
        sys.excepthook = _show_without_launcher
        try:
            self.run_here()
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        leave(0)


def run_words() -> NoReturn:
    """Run the program that this process's words describe: its kind, its name, its own words."""
    kind, name, *words = sys.argv[1:]
    Program(cast(Kind, kind), name, tuple(words)).run_and_leave()


def _show_without_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an exception from the program's own first line on."""
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, "<string>", _RUNPY):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def interpreter() -> list[str]:
    """This Python with the flags that it was started with, and unbuffered."""
    return [sys.executable, "-u", *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
