"""An engine's verbs for whole gradients and parameters, which may be divided over processes, device and host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.errors import GptparError


class WholeTensors(EngineState):
    """Reads and replaces whole gradients, and gathers whole parameters."""

    def full_gradient(self, name: str) -> torch.Tensor:
        """The whole gradient of a parameter, between a backward pass and the step; all processes call it.

        It is the mean over the step's micro-batches and processes, not clipped. After a micro-batch that is not the
        step's last, also in ``no_sync()``, the coming micro-batches count as zero; the first call sums over processes.

        Args:
            name: of the parameter, as the module names it.

        Raises:
            GptparError: the step had no backward pass yet, or no such parameter is trained.
        """
        with self._gradient_of("full_gradient"):
            return self.weights.whole(name, "grad") / self._divisor

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None:
        """Replace the whole gradient of a parameter; all processes call it with the same value.

        The arguments, the time and the errors are those of :meth:`full_gradient`; ``value`` has its shape.
        """
        with self._gradient_of("set_full_gradient"):
            self.weights.set_gradient(name, value * self._divisor)

    def local_gradient(self, name: str) -> torch.Tensor | None:
        """[n] the elements of :meth:`full_gradient` that this process updates, in the order of memory; maybe none.

        Those of all processes, in the order of their numbers, are the whole gradient. ``None``: no such parameter is
        trained. Before the step's last backward pass all processes call it: the first call sums over processes.
        """
        with self._gradient_of("local_gradient"):
            found = self.weights.local(name, "grad")
        return None if found is None else found / self._divisor

    def set_local_gradient(self, name: str, value: torch.Tensor) -> None:
        """Replace the elements of :meth:`local_gradient`; all processes call it, each with its own."""
        with self._gradient_of("set_local_gradient"):
            self.weights.set_gradient(name, value * self._divisor, local=True)

    @contextlib.contextmanager
    def _gradient_of(self, verb: str) -> Iterator[None]:
        """A context for reading or replacing gradients: the passes so far have been summed over processes.

        Raises:
            GptparError: the step has had no backward pass, or a pass or ``train_batch`` is running.
        """
        if not self._has_begun or self._in_train_batch or self.engine.gradients.in_pass:
            raise GptparError(
                f"{verb}() works only between a backward pass and the step, and not within a pass or train_batch()."
            )
        with self._watch.together(verb):
            self._sum_gradient()
            yield

    @contextlib.contextmanager
    def gathered(self, modifier_rank: int | None = None) -> Iterator[None]:
        """A context in which all parameters are gathered, with the last step's values; all processes enter it.

        Parameters that are changed in place inside keep their new values, and the optimizer goes on from them.

        Args:
            modifier_rank: the process whose values count, of those with the same layers (in a pipeline: its position on
                the data axis); ``None``: all processes have made the same changes, to all copies of tied layers.
        """
        with self.weights.gathered(modifier_rank):
            yield
