"""What users do beside training that must not change it: kinds of :class:`Training` for the tests."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR

from tests.any_module.case import Case
from tests.any_module.harness import Training
from tests.any_module.reference import Named, copy_of_weights, mean_over_ranks
from tests.any_module.scenario_cases import DECAY_OF_RATE, OutOfMemory
from tests.any_module.zoo import Mlp

OTHER_SEED = 5


class ForwardFails(Training):
    """An exception in a forward pass, in the first micro-batch of a step and in the last; then the same once more."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        if (step, micro) in ((0, 0), (2, 0), (3, self.setup.accumulation - 1)):
            self.model.failing = True
            with suppress(OutOfMemory):
                self.engine(self.make_batch(step, micro)["x"])
                raise AssertionError("the model's exception is lost")
            self.model.failing = False


class ForwardWithoutBackward(Training):
    """Forward passes whose graphs are dropped, or kept for some steps."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        self.kept = [*getattr(self, "kept", [])[-2:], self.engine(self.make_batch(step + 7, micro)["x"])]
        self.engine(self.make_batch(step + 8, micro)["x"])


class EvaluatesBetween(Training):
    """Evaluates during accumulation and between steps, in two ways; the losses are those of the weights."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        batch = self.make_batch(step + 100, micro)
        self.engine.eval()
        assert not self.model.training
        with torch.no_grad():
            loss = F.mse_loss(self.engine(batch["x"]), batch["y"])
        self.engine.train()
        assert self.model.training and not loss.requires_grad
        if self.trace.weights:
            self.assert_loss(loss, batch)

    def assert_loss(self, loss: torch.Tensor, batch: dict[str, Any]) -> None:
        """Of the weights that the step before gave."""
        plain = self.case.make_model()
        plain.load_state_dict(self.trace.weights[-1])
        torch.testing.assert_close(loss, F.mse_loss(plain(batch["x"]), batch["y"]), rtol=1e-12, atol=0)


class GradientsAreZeroed(Training):
    """Calls what loops of plain torch call, too: the engine does it by itself."""

    def after_step(self, step: int) -> None:
        self.engine.zero_grad()
        self.optimizer.zero_grad()


class NoSync(Training):
    """Every micro-batch but the step's last is under no_sync, as loops of DistributedDataParallel have it."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        last = micro == self.setup.accumulation - 1
        with nullcontext() if last else self.engine.no_sync():
            self.engine.backward(loss)


class UsersScheduler(Training):
    """A scheduler of torch's over the optimizer that ``initialize`` returned, stepped by the user."""

    def _initialize(self, initialize: Any) -> Any:
        config, parameters = self.setup.config(self.case), self.model.parameters()
        made = initialize(model=self.model, config=config, model_parameters=parameters)
        assert isinstance(made[1], torch.optim.Optimizer)
        self.rates = ExponentialLR(made[1], DECAY_OF_RATE)
        return made

    def after_step(self, step: int) -> None:
        self.rates.step()
        assert self.engine.get_lr()[0] == self.rates.get_last_lr()[0]


class RatesByHand(UsersScheduler):
    """The user writes into the groups of the returned optimizer."""

    def after_step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= DECAY_OF_RATE


class TrainsByBatch(Training):
    """``train_batch`` over an iterator in place of forward, backward and step; gradients are not seen."""

    def run(self, start: int, stop: int) -> Any:
        batches = (
            (batch["x"], batch["y"])
            for step in range(start, stop)
            for batch in (self.make_batch(step, micro) for micro in range(self.setup.accumulation))
        )
        for _ in range(start, stop):
            self.trace.losses.append(mean_over_ranks(float(self.engine.train_batch(batches))))
            self.trace.norms.append(float(self.engine.get_global_grad_norm()))
            with self.engine.gathered():
                self.trace.weights.append(copy_of_weights(self.model))
        return self.trace


def weights_of(seed: int) -> Named:
    """Initial values of an MLP."""
    return {name: value.clone() for name, value in Case("mlp", Mlp).make_model(seed).state_dict().items()}


class LoadsWeights(Training):
    """The model gets its weights after ``initialize``, all parameters being gathered."""

    def __init__(self, case: Case, setup: Any, engine: str):
        super().__init__(case, setup, engine, seed=OTHER_SEED)
        with self.engine.gathered():
            self.model.load_state_dict(weights_of(0))


class LoadsWeightsWithoutGathering(Training):
    """The same without ``gathered``: right, or refused with a sentence."""

    def __init__(self, case: Case, setup: Any, engine: str):
        super().__init__(case, setup, engine, seed=OTHER_SEED)
        self.model.load_state_dict(weights_of(0))


class CopiesState(Training):
    """``state_dict`` of the model is whole and right, within ``gathered`` always."""

    def after_step(self, step: int) -> None:
        with self.engine.gathered():
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, value in self.trace.weights[-1].items():
            assert torch.equal(state[name], value), name
