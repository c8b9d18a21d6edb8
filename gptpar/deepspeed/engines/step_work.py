"""The forward and backward passes of a step, which are the part that a step graph can record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gptpar.adapter.module_stage import ModuleStage
from gptpar.adapter.tied_weight import TiedWeight
from gptpar.deepspeed.engines.batches import Batches, LossFunction, call_with, loss_of, mean_of
from gptpar.engine.engine import Engine
from gptpar.errors import GptparError
from gptpar.system.activity import Activity


@dataclass(frozen=True)
class StepResult:
    """The result of a step's passes.

    Attributes:
        loss: the mean over this process's micro-batches, fp32 or wider; zero if the user made the passes and nobody
            needs their mean.
        passes: the scopes called in each forward pass.
        late: parameters whose gradient was formed after their unit's gradient had been handed on.
    """

    loss: torch.Tensor
    passes: Sequence[Sequence[str]]
    late: tuple[str, ...]


class Work(Protocol):
    """The passes of a step.

    Attributes:
        scale: the incoming gradient of each loss, on the device: the loss scale over the number of micro-batches.
    """

    scale: torch.Tensor

    def __call__(self, batches: Batches) -> StepResult:
        """All passes over a step's micro-batches; the gradient is final afterwards."""

    def result(self) -> StepResult:
        """The result of passes that the user has called."""


class StepWork:
    """Runs the passes of a step; between launches, the host has nothing else to do.

    Args:
        stage: the module, on the engine.
        engine: has its parameters.
        call: the module, or a function that calls it.
        loss_fn: see :func:`~gptpar.deepspeed.engines.batches.loss_of`.
        activity: records what this process is doing.
        tied_weight: submits a part of its gradient early; ``None``: there is none.

    Attributes:
        scale: the incoming gradient of each loss, on the device, so that replays read its present value.
    """

    def __init__(
        self,
        stage: ModuleStage,
        engine: Engine,
        call: Callable[..., Any],
        loss_fn: LossFunction | None,
        activity: Activity,
        tied_weight: TiedWeight | None = None,
    ):
        self._tied_weight = tied_weight
        self._stage, self._engine, self._call, self._loss_fn, self._activity = stage, engine, call, loss_fn, activity
        self.scale = torch.ones((), dtype=engine.settings.wide, device=engine.device)
        self._no_loss = torch.zeros_like(self.scale)
        self._is_first = False  # whether the next backward pass is its step's first

    def begin(self, num_passes: int) -> None:
        """Begin the gradients of a step.

        Args:
            num_passes: number of backward passes that will add to them; 2 or more if the number is not known.
        """
        self._engine.gradients.memory.ahead = self._engine.graph_breaks.in_recording
        self._engine.begin_gradients(num_passes)
        self._is_first = True

    def backward(
        self, loss: torch.Tensor, *, last: bool, incoming: float | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of a micro-batch's loss to the step's.

        Args:
            loss: a scalar.
            last: whether the step's gradient is final afterwards.
            incoming: gradient of the loss; ``None``: :attr:`scale`.
            retain_graph: whether autograd keeps the graph for another backward pass.
        """
        gradients = self._engine.gradients
        with self.backward_pass(last=last):
            hook = loss.register_hook(lambda _: gradients.enter_backward(torch._C._current_graph_task_id()))
            try:
                scale = self.scale if incoming is None else torch.full_like(self.scale, incoming)
                torch.autograd.backward(loss, scale.to(loss.dtype).expand(loss.shape), retain_graph=retain_graph)
            finally:
                hook.remove()

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool, unannounced: float | None = None) -> Iterator[None]:
        """A context that takes the gradients of a backward pass, which runs inside.

        Args:
            last: whether the step's gradient is final afterwards.
            unannounced: factor of the gradients of a pass that the user has begun, whose first gradient has come;
                ``None``: the engine begins the pass.
        """
        gradients = self._engine.gradients
        if self._is_first and self._engine.subscriber is not None:
            # Nobody else waits for units that this step does not call.
            self._engine.graph_breaks.at(self._engine.finish)
        self._is_first = False
        observed = unannounced is None
        # Autograd's threads do not take part in an observation that begins within a pass.
        blind = not observed and self._stage.may_observe
        gradients.begin_backward(0, last=last, factor=unannounced or 1.0, ends_together=blind)
        if self._tied_weight is not None:
            self._tied_weight.begin_backward(last=last and observed)
        try:
            exchanges = last or not gradients.memory.keeps_all
            backward = self._stage.backward(gradients.reads_late, last=last, exchanges=exchanges, observed=observed)
            with backward, self._activity.lost_ranks_explained():
                yield
                gradients.end_backward()
                if last:
                    gradients.reducer.finish()
        finally:
            gradients.leave_backward()
            if self._tied_weight is not None:
                self._tied_weight.end_backward()
            self._engine.gatherer.end_backward()

    def sum_gradient(self) -> None:
        """Sum the gradient of the passes so far over processes, amid the step; a later pass has to reopen it."""
        gradients = self._engine.gradients
        gradients.begin_backward(0, last=True)
        gradients.end_backward()
        gradients.reducer.finish()

    def __call__(self, batches: Batches) -> StepResult:
        """All passes of a step.

        Raises:
            GptparError: the module returned no loss, or one without a gradient.
        """
        self._stage.take_passes()
        self.begin(len(batches))
        losses = []
        for number, batch in enumerate(batches):
            loss = loss_of(call_with(self._call, batch), batch, self._loss_fn)
            if not loss.requires_grad:
                raise GptparError(
                    "the loss requires no gradient: train_batch was called under torch.no_grad(), or the loss depends "
                    "on no trained parameter."
                )
            self.backward(loss, last=number == len(batches) - 1)
            self._stage.end_micro_batch()
            losses.append(loss.detach())
        return self.result(mean_of(losses))

    def result(self, loss: torch.Tensor | None = None) -> StepResult:
        """The result of the passes that have ended."""
        late = self._engine.gradients.late
        return StepResult(self._no_loss if loss is None else loss, self._stage.take_passes(), tuple(sorted(late)))

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> torch.Tensor:
        """[] the mean loss over micro-batches, fp32 or wider.

        Raises:
            GptparError: the module returned no loss.
        """
        return mean_of([loss_of(call_with(self._call, batch), batch, self._loss_fn) for batch in batches])
