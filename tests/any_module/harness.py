"""Training with an engine, observed: what a user writes, and the numbers that come out of it."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from tests.any_module.case import Batch, Case, Setup, make_optimizer
from tests.any_module.compare import Deviations, deviations
from tests.any_module.reference import Named, Trace, copy_of_buffers, copy_of_weights, mean_over_ranks

GPTPAR = "gptpar:initialize"
"""What is proved."""


def initializer(engine: str) -> Callable[..., Any]:
    """The function of that name: ``module:function``."""
    module, _, name = engine.partition(":")
    return getattr(importlib.import_module(module), name)


class Training:
    """A case under an engine.

    Args:
        engine: see :func:`initializer`.
        seed: of the model's initial values.
    """

    def __init__(self, case: Case, setup: Setup, engine: str = GPTPAR, seed: int = 0):
        self.case, self.setup, self.trace = case, setup, Trace()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = case.make_model(seed)
        self.trainable = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.engine, self.optimizer, _, self.scheduler = self._initialize(initializer(engine))

    def _initialize(self, initialize: Callable[..., Any]) -> Any:
        case, groups = self.case, self.case.groups(self.model)
        given: dict[str, Any] = {"model": self.model, "config": self.setup.config(case)}
        if case.client:
            given["optimizer"] = make_optimizer(groups)
        else:
            given["model_parameters"] = groups
        if case.schedule is not None and case.client:
            given["lr_scheduler"] = LambdaLR(given["optimizer"], case.schedule)
        elif case.schedule is not None:
            schedule = case.schedule
            given["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, schedule)
        return initialize(**given)

    def run(self, start: int, stop: int) -> Trace:
        """Take the steps ``start`` to ``stop`` (exclusive) and observe each."""
        for step in range(start, stop):
            loss = sum(self._micro_batch(step, micro) for micro in range(self.setup.accumulation))
            self.trace.losses.append(mean_over_ranks(loss))
            self.trace.norms.append(float(self.engine.get_global_grad_norm()))
            self.trace.weights.append(self.weights())
            self.after_step(step)
        self.trace.buffers = copy_of_buffers(self.model)
        return self.trace

    def _micro_batch(self, step: int, micro: int) -> float:
        self.before_micro_batch(step, micro)
        losses = self.case.losses_of(self.engine, self.make_batch(step, micro))
        for number, loss in enumerate(losses):
            if number == len(losses) - 1:
                self.backward(loss, micro)
            else:
                self.backward_before_last(loss)
        if micro == self.setup.accumulation - 1:
            self.trace.gradients.append({name: self._gradient(name) for name in self.trainable})
        self.engine.step()
        return sum(loss.item() for loss in losses) / self.setup.accumulation

    def make_batch(self, step: int, micro: int) -> Batch:
        """This rank's."""
        return self.case.make_batch(step, micro, self.rank, self.setup.world)

    def loss_of(self, step: int, micro: int = 0) -> torch.Tensor:
        """The engine's only loss of a micro-batch."""
        (loss,) = self.case.losses_of(self.engine, self.make_batch(step, micro))
        return loss

    def weights(self) -> Named:
        """Whole ones, on each rank."""
        with self.engine.gathered():
            return copy_of_weights(self.model)

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        """Of a micro-batch."""
        self.engine.backward(loss)

    def backward_before_last(self, loss: torch.Tensor) -> None:
        """Of one of a micro-batch's losses, inside no_sync() or not; the last one follows."""
        with self.engine.no_sync() if self.case.shares_graph else nullcontext():
            self.engine.backward(loss, retain_graph=self.case.shares_graph)

    def before_micro_batch(self, step: int, micro: int) -> None:
        """For scenarios: what else the user does there."""

    def after_step(self, step: int) -> None:
        """For scenarios: what else the user does there."""

    def _gradient(self, name: str) -> torch.Tensor:
        return self.engine.full_gradient(name).detach().clone()


class Alike(Training):
    """Every rank has the first one's batches, as in :func:`~tests.any_module.reference.weights_of_a_loop`."""

    def make_batch(self, step: int, micro: int) -> Batch:
        return self.case.make_batch(step, micro, 0, 1)


def worst_of_ranks(traces: Sequence[Trace], wanted: Trace) -> Deviations:
    """The worst deviation of any rank; buffers are compared on rank 0, which saves them."""
    found: list[Deviations] = []
    for rank, trace in enumerate(traces):
        one = deviations(trace, wanted)
        found.append(one if rank == 0 else {kind: one[kind] for kind in one if kind != "buffer"})
    return {kind: max(one[kind] for one in found if kind in one) for kind in found[0]}
