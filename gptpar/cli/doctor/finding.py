"""One line of what the doctor found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        name: of the thing.
        text: what it is, with numbers.
        advice: what to do about it; empty where nothing need be done.
        value: the number behind the text, in bytes, bytes a second or as the text says; ``None`` where there is none.
    """

    name: str
    text: str
    advice: str = ""
    value: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether nothing need be done."""
        return not self.advice


def unless(good: bool, advice: str) -> str:
    """The advice where something is not good."""
    return "" if good else advice
