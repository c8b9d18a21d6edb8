"""Reads ``elsewhere.toml``: what a run answers to the flags of Megatron-LM, Megatron-DeepSpeed and their forks.

- ``no_effect``: reason -> number of values ("any", "0", "1") -> the flags that are accepted and change nothing here.
- ``limited``: flags, their accepted values, the reason, and the refusal of other values if it is no common one.
- ``experts``: how flags for mixture-of-experts begin, and their refusal; a flag in ``limited`` is answered there.
- ``absent``: what gptpar lacks -> how flags that ask for it begin, in whole words.
- ``stands_for``: another program's flag, with its value -> the field that says it here, and its value.
- ``meant``: a flag of gptpar -> other programs' flags that mean nearly the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gptpar.config.fields import MAX_ECHOED

FILE = Path(__file__).with_suffix(".toml")
OTHER_EXPERTS = "DeepSpeed's mixture-of-experts is not part of gptpar"
"""Why flags have no effect on a dense model."""
OF_THE_LAUNCH = ("--world-size", "--rank")
"""Flags that place a process among others; they must fit what the environment says."""
ANY_NUMBER = -1
"""A number of values that stands for any."""


@dataclass(frozen=True)
class Answer:
    """The answer of a run to a flag of another program.

    Attributes:
        why: the flag changes nothing here.
        count: how many values it takes, or ``ANY_NUMBER``.
        refused: the sentence for values other than ``accepted``; empty where every value is accepted.
        accepted: the values that change nothing.
        several: whether it takes several of them.
    """

    why: str
    count: int = ANY_NUMBER
    refused: str = ""
    accepted: tuple[str, ...] = ()
    several: bool = False

    def to(self, name: str, values: Sequence[str]) -> tuple[list[str], list[str]]:
        """The notes on a flag without effect, and the problems."""
        given = len(values) if any(values) or not self.refused else 0
        wrong_number = f"{name} takes {self.count} value(s), {given} given."
        without_effect = [f"{name}: {self.why}"]
        if not self.refused:
            return without_effect, [] if self.count in (ANY_NUMBER, len(values)) else [wrong_number]
        if self.count != ANY_NUMBER and not any(values):
            return [], [wrong_number]
        if (len(values) == 1 or (values and self.several)) and all(map(self._accepts, values)):
            return without_effect, []
        said = " ".join([name, *values])[:MAX_ECHOED]
        return [], [self.refused.format(said=said, name=name, why=self.why, accepted=" or ".join(self.accepted))]

    def _accepts(self, value: str) -> bool:
        """Whether a value is an accepted word, or the same number: 0.0 is 0."""
        return any(value == one or _number(value) == _number(one) for one in self.accepted)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


@dataclass(frozen=True)
class Elsewhere:
    """The flags of other programs.

    Attributes:
        flags: flag -> its answer.
        starts: how flags begin, in whole words -> their answer.
        stands_for: flag, with its value -> the field that says it here, and its value.
        meant: flag -> the one of gptpar that means nearly the same.
        names: the flags that can be accepted.
    """

    flags: Mapping[str, Answer]
    starts: Mapping[str, Answer]
    stands_for: Mapping[str, tuple[str, Any]]
    meant: Mapping[str, str]
    names: frozenset[str]

    def answer(self, name: str) -> Answer | None:
        """The answer to a flag that is neither gptpar's nor stands for one."""
        begins = (one for start, one in self.starts.items() if f"{dashed(name)}-".startswith(f"{start.rstrip('-')}-"))
        return self.flags.get(name) or next(begins, None)


def dashed(name: str) -> str:
    """A flag without underscores."""
    return name.replace("_", "-")


@cache
def elsewhere() -> Elsewhere:
    """The flags of other programs, from their file."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))
    flags = {
        flag: Answer(why, ANY_NUMBER if count == "any" else int(count))
        for why, by_count in rows["no_effect"].items()
        for count, names in by_count.items()
        for flag in names
    }
    refused = "{said}: {why}; leave it out, or give {accepted}."
    for one in rows["limited"]:
        names, accepted = one.pop("flags"), tuple(one.pop("accepted"))
        flags |= dict.fromkeys(names, Answer(**{"refused": refused, **one, "accepted": accepted}))
    experts = Answer(rows["experts"]["why"], refused=rows["experts"]["refused"])
    lacking = Answer("", refused="{said}: {why} is not part of gptpar; leave it out.")
    starts = dict.fromkeys(rows["experts"]["starts"], experts)
    starts |= {start: replace(lacking, why=what) for what, names in rows["absent"].items() for start in names}
    stands_for = {said: (key, value) for said, (key, value) in rows["stands_for"].items()}
    meant = {theirs: ours for ours, names in rows["meant"].items() for theirs in names}
    return Elsewhere(flags, starts, stands_for, meant, frozenset({*flags, *(said.split()[0] for said in stands_for)}))
