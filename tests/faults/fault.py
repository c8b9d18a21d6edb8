"""Faults, their kinds and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.place import Place

OK = "ok"
OUTCOMES = (
    OK,
    "silent loss",  # a checkpoint reported as saved is not there, or a wrong number is printed without a warning
    "work lost",  # more steps are lost than a save interval, or than a request to stop may cost
    "hang",  # the command did not end in time, or left a process behind
    "code executed",
    "traceback",  # instead of a sentence; or a death by a signal that nobody sent
    "wrong continuation",  # losses or final state differ from those of the undisturbed run
    "not whole",  # a run did not go on although it had to, or changed a file of another program
)


class Failed(Exception):
    """An oracle's verdict: one of the bad outcomes, and what the oracle saw."""

    def __init__(self, outcome: str, seen: str):
        assert outcome in OUTCOMES[1:]
        self.outcome, self.seen = outcome, seen
        super().__init__(f"{outcome}: {seen}")


@dataclass
class Measured:
    """The cost of a survived fault.

    Attributes:
        steps_lost: iterations that were trained again.
        seconds_to_exit: from the fault, or from the request to stop, to the end of the last process.
    """

    steps_lost: int = 0
    seconds_to_exit: float = 0.0


@dataclass(frozen=True)
class Kind:
    """A way of injecting faults.

    Attributes:
        name: a few words joined by hyphens.
        inject: injects one, and judges; all that is random comes from ``place.random``.
        workers: of the runs that it disturbs.
        share: number of faults of this kind, in proportion to the shares of the other kinds.
    """

    name: str
    inject: Callable[[Place], Measured]
    workers: int
    share: float


WORKERS = {"one": 1, "two": 2, "four": 4}
Injection = Callable[["Place"], Measured]


def kind(kinds: list[Kind], **shares: float) -> Callable[[Injection], Injection]:
    """Add a function to the kinds, under its own name: ``one=3, four=1`` gives its shares by number of workers."""

    def add(inject: Injection) -> Injection:
        name = inject.__name__.replace("_", "-")
        kinds.extend(Kind(name, inject, WORKERS[number], share) for number, share in shares.items())
        return inject

    return add


@dataclass(frozen=True, order=True)
class Fault:
    """One fault: kind, workers and seed say everything about it."""

    kind: str
    workers: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.workers}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, workers, seed = text.split(":")
        return cls(kind, int(workers), int(seed))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a fault."""

    fault: str
    outcome: str
    seen: str = ""
    steps_lost: int = 0
    seconds_to_exit: float = 0.0
    seconds: float = field(default=0.0, compare=False)


def chosen(kinds: Sequence[Kind], count: int, seed: int) -> list[Fault]:
    """About ``count`` faults, divided by the kinds' shares, at least one of each kind; seeds count up from ``seed``."""
    whole = sum(kind.share for kind in kinds)
    faults = []
    for kind in kinds:
        number = max(1, round(count * kind.share / whole))
        faults += [Fault(kind.name, kind.workers, seed + i) for i in range(number)]
    return faults
