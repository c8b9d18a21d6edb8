"""Torch's stance towards compiled code: while a module's first pass is observed, code runs uncompiled."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch


class EagerStance:
    """Makes code run uncompiled while at least one engine needs that, then restores the earlier stance.

    The stance belongs to the whole process, so that one object owns it: :data:`EAGER_STANCE`. Engines' needs may
    overlap: a GAN's discriminator is first called between its generator's first forward and backward pass.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._stance: AbstractContextManager[Any] | None = None

    def force(self) -> None:
        """Run code uncompiled until :meth:`restore` has been called as often as this method."""
        with self._lock:
            if not self._count:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._count += 1

    @property
    def is_forced(self) -> bool:
        """Whether code runs uncompiled now."""
        return self._count > 0

    def restore(self) -> None:
        """Undo one :meth:`force`."""
        with self._lock:
            self._count -= 1
            if not self._count and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


EAGER_STANCE = EagerStance()
