"""The backward pass at work in this process, whichever engine has begun it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class BackwardPasses:
    """Tells engines of each other's backward passes.

    A loss may lead through modules of several engines, as a GAN's generator learns through the discriminator. Autograd
    then computes gradients for all of them, and the pass is that of one engine: the others drop theirs. Autograd's
    threads belong to the process, so one object knows: :data:`BACKWARD_PASSES`.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._at_end: dict[Callable[[], None], None] = {}

    @property
    def is_running(self) -> bool:
        """Whether an engine has begun a pass that is not over."""
        return self._depth > 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a backward pass."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            while self._at_end and not self._depth:
                self._at_end.popitem()[0]()

    def at_end(self, act: Callable[[], None]) -> None:
        """Act when the pass at work is over, also after an error, and once however often it is asked for."""
        if self._depth:
            self._at_end[act] = None


BACKWARD_PASSES = BackwardPasses()
