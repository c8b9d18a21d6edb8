"""An engine's setters, with DeepSpeed's names: what the next steps do otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.errors import GptparError


class StepSettings(EngineState):
    """Changes the numbers of the following steps."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of the next steps; their size stays.

        Args:
            train_batch_size: samples of a step, on all processes.

        Raises:
            GptparError: it is no multiple of a micro-batch on each process, or a step has begun.
        """
        self._require_open()
        self._require_no_step()
        batch = self.options.batch.resized(train_batch_size, self.topology.mesh.data)
        if batch.accumulation_steps > 1:
            self._add_gradients()
        self.options, self.data.number = replace(self.options, batch=batch), batch.accumulation_steps

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Change the number of micro-batches of the next steps; see :meth:`set_train_batch_size`."""
        self.set_train_batch_size(steps * self.options.batch.micro_batch_size * self.topology.mesh.data)

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of the next steps; a schedule replaces it when it steps.

        Args:
            lr: of all parameter groups, or a list with one for each.

        Raises:
            GptparError: there are more or fewer rates than groups.
        """
        groups = self.optimizer.param_groups
        rates = list(lr) if isinstance(lr, Sequence) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise GptparError(f"set_lr() got {len(rates)} learning rates for {len(groups)} parameter groups.")
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _add_gradients(self) -> None:
        """Between two steps: give sums over several micro-batches memory, if they have none."""
        if not self.engine.can_add_gradients:
            self.engine.add_gradients()
