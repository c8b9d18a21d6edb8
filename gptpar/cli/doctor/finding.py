"""``Finding``: one line of what the doctor found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the thing that was checked.
        text: what was found, with numbers.
        advice: what to do; empty if all is good.
        value: the number in the text, in bytes, bytes a second or the text's unit; ``None`` if there is none.
    """

    name: str
    text: str
    advice: str = ""
    value: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice


def unless(good: bool, advice: str) -> str:
    """The advice, or an empty text if all is good."""
    return "" if good else advice
