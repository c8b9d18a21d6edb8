"""Torch's stance towards compiled code: while any module's first pass is watched, it runs uncompiled."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch


class EagerStance:
    """Keeps compiled code uncompiled while anybody wants that, and restores what it found when the last one is done.

    The stance is the process's, so one object owns it: :data:`EAGER_STANCE`. Engines want it by turns that overlap: a
    GAN's discriminator is first called between its generator's first forward and backward pass.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._stance: AbstractContextManager[Any] | None = None

    def force(self) -> None:
        """Run compiled code uncompiled, until as many calls of :meth:`restore` have come."""
        with self._lock:
            if not self._count:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._count += 1

    def restore(self) -> None:
        """Take back one :meth:`force`."""
        with self._lock:
            self._count -= 1
            if not self._count and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


EAGER_STANCE = EagerStance()
