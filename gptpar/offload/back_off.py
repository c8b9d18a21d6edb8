"""Decides for how many steps the CPU optimizer does not speculate after a speculation that was wrong."""

from __future__ import annotations

LONGEST = 10
"""Steps. A step that is clipped is often followed by others, and each wrong speculation is work for nothing."""


class BackOff:
    """After the first wrong speculation one step without, then 2, 4 and so on as long as each one is wrong.

    Attributes:
        steps: how many of the coming steps do not speculate.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._following = 1

    def after_step(self, *, wrong: bool, right: bool) -> None:
        """A step was taken.

        Args:
            wrong: whether a bucket's speculation was wrong.
            right: whether a bucket's speculation was right.
        """
        if wrong:
            self.steps = min(self._following, LONGEST)
            self._following = min(2 * self._following, LONGEST)
        else:
            self.steps = max(0, self.steps - 1)
            if right:
                self._following = 1
