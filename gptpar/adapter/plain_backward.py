"""``PlainBackward``: backward passes that the user begins by ``loss.backward()``, without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from gptpar.engine.backward_passes import BACKWARD_PASSES
from gptpar.errors import GptparError


class PlainBackward:
    """Finds the beginning and the end of passes that are not announced.

    Such a pass begins at its first gradient of a parameter: until then it cannot be told from a call of
    ``torch.autograd.grad``, which leaves no gradient in ``.grad``. It ends when autograd has done all its work. Nested
    passes of reentrant recomputation end earlier, so autograd is asked to tell its end while the outermost pass goes
    through the module's outputs.

    Args:
        take: makes a context that takes a pass's gradients; called when the pass begins.
        end: called when autograd has done its work; its argument says whether a pass had begun.
    """

    def __init__(self, take: Callable[[], contextlib.AbstractContextManager[None]], end: Callable[[bool], None]):
        self._take, self._end = take, end
        self._task = -1  # autograd's number of the outermost pass
        self._context: contextlib.ExitStack | None = None

    def comes_back(self) -> None:
        """A gradient has reached an output of the module."""
        task = torch._C._current_graph_task_id()
        if not BACKWARD_PASSES.belongs_to_engine and task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def begin(self) -> None:
        """The first gradient of a parameter has come."""
        if self._task < 0:  # the loss does not depend on the module's outputs
            self.comes_back()
        context = contextlib.ExitStack()
        context.enter_context(self._take())
        self._context = context

    def _ended(self) -> None:
        context, self._context, self._task = self._context, None, -1
        if context is not None:
            context.close()
        self._end(context is not None)

    def abandon(self) -> bool:
        """Outside of autograd: forget a pass that has ended in an error; returns whether there was one."""
        if torch._C._current_graph_task_id() >= 0:
            return False
        context, self._context, self._task = self._context, None, -1
        if context is not None:
            error = GptparError("loss.backward() ended in an error")
            context.__exit__(type(error), error, None)
        return context is not None
