"""The engine that a training script holds: DeepSpeed's verbs over any module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gptpar.activity import Activity
from gptpar.any_module.agreement import Passes
from gptpar.any_module.module_stage import ROOT, ModuleStage
from gptpar.any_module.options import EngineOptions
from gptpar.any_module.training_engine import TrainingEngine
from gptpar.any_module.weights import Weights
from gptpar.engine.engine import Engine
from gptpar.errors import GptparError
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.topology import Topology


class ModuleEngine(TrainingEngine):
    """Trains a module: ``loss = engine(x)``, ``engine.backward(loss)``, ``engine.step()`` for each micro-batch.

    Args:
        stage: the module, on the engine.
        Others as in :class:`TrainingEngine`.
    """

    def __init__(
        self,
        stage: ModuleStage,
        engine: Engine,
        host: HostOptimizer | None,
        weights: Weights,
        groups: list[dict[str, Any]],
        options: EngineOptions,
        topology: Topology,
        activity: Activity,
    ):
        super().__init__(stage.module, engine, host, weights, groups, options, topology, activity)
        self._stage = stage
        self._no_sync = False
        self._boundary: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating-point inputs are cast where the configuration says ``auto_cast``."""
        self._require_open()
        args, kwargs = self._cast_inputs((args, kwargs))
        with self._activity.lost_ranks_explained():
            return self.module(*args, **kwargs)

    # A step.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at work is its step's last."""
        return self._is_final or self._is_last()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming micro-batches end a step, in place of counting them."""
        self._boundary = is_boundary

    def _is_last(self) -> bool:
        wanted = self._count + 1 >= self.options.batch.accumulation_steps
        return not self._no_sync and (wanted if self._boundary is None else self._boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes done inside are added to, and not yet summed over processes.

        It is for all backward passes of a micro-batch but the last, if there are several.
        """
        settings = self.engine.settings
        if not settings.adds_gradients and settings.dtype != settings.wide:
            raise GptparError(
                "no_sync() adds gradients of several micro-batches, and gradient_accumulation_steps is 1: set it, so "
                "that the sums get memory."
            )
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Add the gradient of a micro-batch's loss to the step's.

        The step's gradient is the mean over its micro-batches and the data-parallel processes.

        Args:
            loss: a scalar that :meth:`forward` has led to.
            scale_wrt_gas: whether this loss is one of ``gradient_accumulation_steps`` to be averaged; else it counts
                in full.

        Returns:
            The loss.

        Raises:
            GptparError: the step's gradient is final already, or the loss is no scalar with a gradient.
        """
        self._require_loss(loss)
        if not self._has_begun:
            passes = self.options.batch.accumulation_steps
            self._begin(max(passes, 2) if self._no_sync else passes)
        last = self._is_last()
        scale = self.loss_scale.value * (1 if scale_wrt_gas else self.options.batch.accumulation_steps)
        self.engine.gradients.begin_backward(0, last=last)
        self._stage.in_backward = True
        collector = self.engine.gradients.collector
        hook = loss.register_hook(lambda _: collector.enter_backward(torch._C._current_graph_task_id()))
        try:
            with self._activity.lost_ranks_explained():
                torch.autograd.backward(loss, torch.full_like(loss, scale), retain_graph=retain_graph)
                self.engine.gradients.end_backward()
                if last:
                    self.engine.gradients.finish()
        finally:
            hook.remove()
            self._stage.in_backward = False
        self.engine.gatherer.let_all_go()
        self._is_final = last
        return loss

    def step(self) -> None:
        """End a micro-batch; after the step's last one, update the parameters.

        Raises:
            GptparError: no gradient of the micro-batch is final, though it is the step's last.
        """
        self._require_open()
        ends_step = self._is_final or self._is_last()
        if ends_step and not self._is_final:
            raise GptparError(
                "engine.step() at the end of a step whose last micro-batch had no engine.backward(loss), or had it in "
                "no_sync() alone: nothing was changed."
            )
        self._count += 1
        self.micro_steps += 1
        if ends_step:
            self.optimizer.step()

    def _require_final(self) -> None:
        if not self._is_final:
            raise GptparError(
                f"{self._count} of {self.options.batch.accumulation_steps} micro-batches of the step are done: "
                "the optimizer can step after the last one's engine.backward(loss)."
            )

    def _take_passes(self) -> Passes:
        return self._stage.take_passes()

    def _follow(self, passes: Passes) -> None:
        if passes:
            self.engine.gatherer.follow([passes[-1]], stays=(ROOT,))

    def _require_loss(self, loss: torch.Tensor) -> None:
        self._require_open()
        if self._is_final:
            raise GptparError(
                "engine.backward(loss) after the step's gradient became final: call engine.step() first. If a "
                'micro-batch has several backward passes, do all but the last "with engine.no_sync():", or add up the '
                "losses and call backward once."
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise GptparError(f"engine.backward needs a scalar loss with a gradient, not {_described(loss)}.")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} that {'has' if value.requires_grad else 'requires no'} gradient"
