"""Describes how a worker failed, as a record and as a sentence."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from gptpar.errors import NotSavedError


@dataclass(frozen=True)
class Failure:
    """The first worker that failed.

    Attributes:
        code: its exit code, or minus the number of the signal that killed it; ``None``: it lives and does nothing.
        doing: its last note.
        silent: seconds in which no worker showed a sign of life.
        stopped: whether it was stopped (SIGSTOP).
        final: whether the run itself reported the error (wrong flags, damaged data, divergence): it would come again.
        remark: why no restart follows, as the end of the sentence; may be empty.
    """

    rank: int
    code: int | None
    doing: str
    silent: float = 0.0
    stopped: bool = False
    final: bool = False
    remark: str = ""

    @property
    def is_exit(self) -> bool:
        """Whether the worker ended by itself, as after an exception."""
        return self.code is not None and self.code > 0

    @property
    def exit_code(self) -> int:
        """The exit code of a launcher that ends because of this failure."""
        return max(1, self.code or 0)

    def is_repeated(self, before: Failure | None) -> bool:
        """Whether this failure and the one before are the same exception at the same place, which would come again."""
        return self.is_exit and before is not None and (self.code, self.doing) == (before.code, before.doing)

    def __str__(self) -> str:
        """The failure as a sentence without its full stop."""
        return f"rank {self.rank} {self._what()}{self.remark}"

    def _what(self) -> str:
        place = f"while it was at {self.doing}"
        if self.code is None:
            how = "is stopped" if self.stopped else "does nothing"
            return f"{how} at {self.doing}, and no worker has shown a sign of life for {self.silent:.0f} s"
        if self.code == -signal.SIGKILL:
            return f"was killed by SIGKILL, as Linux does to the largest process when memory is full, {place}"
        if self.code == -signal.SIGBUS:
            return f"was killed by SIGBUS, as Linux does when a mapped file is cut short or /dev/shm is full, {place}"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name} {place}"
        lost = "; the newest state is not on the disk" if self.code == NotSavedError.exit_status else ""
        return f"ended with exit code {self.code} {place}; its message is above{lost}"
