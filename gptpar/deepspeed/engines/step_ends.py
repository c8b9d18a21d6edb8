"""Where a step of a module's engine ends: by counting micro-batches, by the program's word, or with ``step()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gptpar.deepspeed.engines.engine_state import EngineState, StepGradient
from gptpar.errors import UsageError


class StepEnds(EngineState):
    """The verbs that say which micro-batch is a step's last."""

    _no_sync = False
    _boundary: bool | None = None  # whether micro-batches are last; None: they are counted

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step; always, where each ``step()`` ends one."""
        return not self.options.managed or self._gradient is StepGradient.FINAL or self._is_last()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether each of the next micro-batches ends its step; without this call, micro-batches are counted.

        Raises:
            UsageError: the configuration has ``"managed_gradient_accumulation": false``.
        """
        self._require_managed("set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def _is_last(self) -> bool:
        if not self.options.managed:
            return False  # step() says it, afterwards
        wanted = self._count + 1 >= self.options.batch.accumulation_steps
        return not self._no_sync and (wanted if self._boundary is None else self._boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backward passes that are not the last of a step: gradients are added up, and are not final.

        If a micro-batch has several backward passes, all but the last may be inside: then gradients are final once, and
        not anew with each pass. Under ZeRO-2 and 3, gradients are still summed over processes inside.
        """
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """A context for all backward passes of a step: the step's gradient is final once, at the context's end.

        ``engine.step()`` comes after it, and ends the step. As in :meth:`no_sync`, ZeRO-2 and 3 sum gradients over
        processes inside.

        Raises:
            NotImplementedError: the ZeRO stage is 0.
            UsageError: this is inside of :meth:`no_sync`, or of itself, or each ``step()`` ends a step anyway.
        """
        if self.options.zero_stage == 0:
            raise NotImplementedError("coalesce_grad_reduction needs ZeRO stage 1, 2 or 3, not 0: use no_sync there.")
        if self._no_sync:
            raise UsageError("coalesce_grad_reduction was nested in no_sync(), or in itself: enter it outside.")
        self._require_managed("coalesce_grad_reduction")
        boundary = self._boundary
        with self.no_sync():
            yield
        self._boundary = boundary  # the block's passes are one step, whatever it has said of boundaries
        self._end_gradient()

    def _require_managed(self, verb: str) -> None:
        if not self.options.managed:
            raise UsageError(
                f'{verb} says where a step ends, and with "managed_gradient_accumulation": false engine.step() does.'
            )

    def _end_gradient(self) -> None:
        """The passes so far were all of the step's: its gradient is final."""
        if self._has_begun:
            self._sum_gradient()
        if self._gradient is StepGradient.READ:
            self._gradient = StepGradient.FINAL
            self._guard_until_step()
