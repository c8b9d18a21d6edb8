"""Keeps the backward pass that runs in this process, whichever engine began it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class BackwardPasses:
    """Records which engine a running backward pass belongs to, for all engines of a process.

    A loss may lead through modules of several engines: a GAN's generator learns through the discriminator. Autograd
    then computes gradients for all these modules, but the pass belongs to one engine, and the others drop their
    gradients. Autograd's threads belong to the process, so the process has one object: :data:`BACKWARD_PASSES`.
    """

    def __init__(self) -> None:
        self._depth = self._owned = 0
        self._at_end: dict[Callable[[], None], None] = {}

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is running."""
        return self._depth > 0

    @property
    def belongs_to_engine(self) -> bool:
        """Whether a pass that is running belongs to an engine."""
        return self._owned > 0

    @contextlib.contextmanager
    def one(self, *, owned: bool = True) -> Iterator[None]:
        """A context that lasts for one backward pass; ``owned``: it belongs to an engine."""
        self._depth += 1
        self._owned += owned
        try:
            yield
        finally:
            self._depth -= 1
            self._owned -= owned
            while self._at_end and not self._depth:
                self._at_end.popitem()[0]()

    def at_end(self, act: Callable[[], None]) -> None:
        """Call ``act`` once when the running pass ends, also after an error; asking again changes nothing."""
        if self._depth:
            self._at_end[act] = None


BACKWARD_PASSES = BackwardPasses()
