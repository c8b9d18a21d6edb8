"""What every engine of ``gptpar.initialize`` has in common: steps, their numbers, schedules, whole tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gptpar.activity import Activity
from gptpar.any_module.agreement import Agreement, Passes
from gptpar.any_module.optimizer import EngineOptimizer
from gptpar.any_module.options import EngineOptions
from gptpar.any_module.tensors import mapped
from gptpar.any_module.weights import Weights
from gptpar.engine.engine import Engine
from gptpar.engine.readings import Readings
from gptpar.errors import GptparError
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.topology import Topology

TIMEOUT_S = 1800.0


class TrainingEngine(nn.Module):
    """Takes steps over an :class:`~gptpar.engine.engine.Engine` whose gradients somebody else has made final.

    Between the backward pass and the step a parameter's ``.grad`` is empty: :meth:`full_gradient` has its gradient.

    Args:
        module: what is trained.
        engine: where it is trained.
        host: the CPU optimizer; ``None``: nothing is offloaded.
        weights: the module's.
        groups: the parameter groups, whose numbers hold at each step.
        options: everything that was configured.
        topology: this process's place.
        activity: is told what this process is doing.

    Attributes:
        module: the user's.
        optimizer: the parameter groups.
        lr_scheduler: is stepped after each step; ``None``: nobody is.
        options: as given.
        global_steps: steps taken, skipped ones included.
        skipped_steps: steps that changed nothing because the gradient was not finite, as far as they are known.
        micro_steps: micro-batches so far.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        host: HostOptimizer | None,
        weights: Weights,
        groups: list[dict[str, Any]],
        options: EngineOptions,
        topology: Topology,
        activity: Activity,
    ):
        super().__init__()
        self.module = module
        self.options, self.topology, self.engine, self.host = options, topology, engine, host
        self.optimizer = EngineOptimizer(groups, self._update, self.zero_grad)
        self.lr_scheduler: LRScheduler | None = None
        self.loss_scale = copy(options.loss_scale)
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.weights, self._activity = weights, activity
        self._agreement = Agreement(topology, ordered=engine.gatherer.gathers_in_call_order)
        self._count = 0  # complete micro-batches of the step at work
        self._has_begun = self._is_final = self._closed = False
        self._readings: Readings | None = None
        self._norm, self._was_skipped = 0.0, False

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self.topology.device

    def _cast_inputs(self, inputs: Any) -> Any:
        """Nested inputs, floating-point ones cast where the configuration says ``auto_cast``."""
        dtype = self.options.dtype
        if not self.options.cast_inputs or dtype is None:
            return inputs
        return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    # A step.

    def _begin(self, num_micro_batches: int) -> None:
        """A step's first micro-batch is at work."""
        self._activity.note(f"step {self.global_steps + 1}")
        self._take_note_of_last_step()
        self.weights.catch_up()
        self.engine.begin_gradients(num_micro_batches)
        self.engine.optimizer.expect_step(self.optimizer.hyperparameters(), self._divisor)
        self._has_begun = True

    @property
    def _divisor(self) -> float:
        """What the sum of all gradients is divided by: the loss scale, and the number of addends of the mean."""
        return self.loss_scale.value * self.options.batch.accumulation_steps * self.topology.layout.data

    def _require_final(self) -> None:
        """Called before an update.

        Raises:
            GptparError: the step's gradient is not final.
        """
        raise NotImplementedError

    def _take_passes(self) -> Passes:
        """The units called in each forward pass of the step, where processes could differ in them."""
        return ()

    def _follow(self, passes: Passes) -> None:
        """Expect the next step to be like this one."""

    def _update(self) -> None:
        self._require_final()
        self._activity.note(f"step {self.global_steps + 1}, optimizer")
        passes = self._take_passes()
        square = self.engine.square_of_grad()
        evidence = self._agreement.evidence(passes, self.engine.gradients.collector.late, square)
        sums = self.topology.sum_over_all(torch.cat([square[None], evidence]))
        norm = sums[0].sqrt() / torch.full_like(sums[0], self._divisor)
        norm, verdict = self._agreement.judge(norm, sums[1:])
        skipped = self.engine.step(norm, self.optimizer.hyperparameters(), self._divisor)
        self._readings = Readings([norm, skipped, verdict], TIMEOUT_S)
        self._follow(passes)
        self.global_steps += 1
        self._forget_step()
        if self.loss_scale.dynamic or self.device.type == "cpu":
            self._take_note_of_last_step()
        if self.lr_scheduler is not None and not (self.loss_scale.dynamic and self._was_skipped):
            self.lr_scheduler.step()

    def _take_note_of_last_step(self) -> None:
        """Read the numbers of the last step, which has had time to end.

        Raises:
            GptparError: it was refused, on all processes.
        """
        readings, self._readings = self._readings, None
        if readings is None:
            return
        self._norm, skipped, verdict = readings.read()
        self._was_skipped = bool(skipped)
        if verdict:
            raise self._agreement.error(verdict, self.global_steps)
        self.skipped_steps += self._was_skipped
        self.loss_scale.update(self._was_skipped)
        every = self.options.steps_per_print
        if every and self.global_steps % every == 0 and self.topology.is_main:
            rates = ", ".join(f"{group['lr']:.4g}" for group in self.optimizer.param_groups)
            print(
                f"step {self.global_steps}: learning rate {rates}, gradient norm {self._norm:.4g}, "
                f"{self.skipped_steps} skipped so far",
                flush=True,
            )

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the last step's gradient before clipping; waits for that step. 0 before the first."""
        self._take_note_of_last_step()
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step at work."""
        if self._is_final and self.host is not None:
            self.host.cancel()
        self._forget_step()

    def _forget_step(self) -> None:
        self._count, self._has_begun, self._is_final = 0, False, False

    # Whole tensors.

    def full_gradient(self, name: str) -> torch.Tensor:
        """The whole gradient of a parameter, between the step's last backward pass and the step; all processes call it.

        It is the mean over micro-batches and processes, not clipped.

        Args:
            name: of the parameter, as the module names it.

        Raises:
            GptparError: the step's gradient is not final, or no such parameter is trained.
        """
        if not self._is_final:
            raise GptparError("full_gradient() is there between the step's last backward pass and the step.")
        return self.weights.whole(name, "grad") / self._divisor

    @contextlib.contextmanager
    def gathered(self, modifier_rank: int | None = None) -> Iterator[None]:
        """Inside, all parameters are there, with the last step's values; all processes enter and leave it.

        Parameters that are changed in place inside keep their new values, and the optimizer goes on from them.

        Args:
            modifier_rank: the process whose values count; ``None``: all processes have changed them alike.
        """
        with self.weights.gathered(modifier_rank):
            yield

    def close(self) -> None:
        """End the engine's background work, also in the middle of a step; afterwards there are no steps."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _require_open(self) -> None:
        if self._closed:
            raise GptparError("the engine is closed: make a new one with gptpar.initialize.")
