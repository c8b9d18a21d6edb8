"""The user writes and reads the model's weights, or closes an engine and trains the module in another one."""

import pytest
import torch

from gptpar.errors import GptparError
from tests.any_module.case import Batch, Case, Setup
from tests.any_module.harness import Training, initializer
from tests.any_module.reference import Named, Trace
from tests.any_module.zoo import Mlp

OTHER_SEED = 5


def weights_of(seed: int) -> Named:
    """Initial values of an MLP."""
    return {name: value.clone() for name, value in Case("mlp", Mlp).make_model(seed).state_dict().items()}


class LoadsWeights(Training):
    """The model gets its weights in parts after ``initialize``: at once, gathered, and after a dropped gradient."""

    def __init__(self, case: Case, setup: Setup, engine: str):
        super().__init__(case, setup, engine, seed=OTHER_SEED)
        self._load("first")
        with self.engine.gathered():
            self._load("blocks")
        (loss,) = self.case.losses_of(self.engine, self.make_batch(7, 0))
        self.engine.backward(loss)
        self.engine.zero_grad()
        self._load("last")

    def _load(self, part: str) -> None:
        state = {name: value for name, value in weights_of(0).items() if name.startswith(part)}
        self.model.load_state_dict(state, strict=False)


class CopiesState(Training):
    """``state_dict`` of the model is whole and right, within ``gathered`` and without."""

    def after_step(self, step: int) -> None:
        self._assert_whole(self.model.state_dict())
        with self.engine.gathered():
            self._assert_whole(self.model.state_dict())

    def _assert_whole(self, state: Named) -> None:
        wanted = self.trace.weights[-1]
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(state[name], value), name


class ClosesInAStep(Training):
    """Closes engines within their second step, each later than the one before; the module has the first step's weights.

    A step has two micro-batches, so that an engine can be closed between them.
    """

    def __init__(self, case: Case, setup: Setup, engine: str):
        acts = ("forward", "backward", "step", "forward", "backward")
        for num_acts in (1, 2, 3, 5):
            super().__init__(case, setup, engine, seed=OTHER_SEED)
            (wanted,) = self.run(0, 1).weights
            batch = self.make_batch(1, 0)
            for act in acts[:num_acts]:
                self._do(act, batch)
            self.engine.close()
            self.engine.close()
            assert all(torch.equal(value, wanted[name]) for name, value in self.model.named_parameters())
            self._assert_closed(batch)
        self.model.load_state_dict(weights_of(0))
        self.trace = Trace()
        self.engine, self.optimizer, _, self.scheduler = self._initialize(initializer(engine))

    def _do(self, act: str, batch: Batch) -> None:
        if act == "forward":
            (self.loss,) = self.case.losses_of(self.engine, batch)
        elif act == "backward":
            self.engine.backward(self.loss)
        else:
            self.engine.step()

    def _assert_closed(self, batch: Batch) -> None:
        for act in (lambda: self.engine(batch["x"]), lambda: self.engine.backward(self.loss), self.engine.step):
            with pytest.raises(GptparError, match="the engine is closed"):
                act()


WEIGHTS = [
    Case("weights_loaded", Mlp, training=LoadsWeights, micro_batches=2),
    Case("state_copied", Mlp, training=CopiesState),
    Case("closed_within_a_step", Mlp, training=ClosesInAStep, micro_batches=2),
]
