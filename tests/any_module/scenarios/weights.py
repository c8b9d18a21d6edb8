"""The user writes and reads the model's weights."""

import torch

from tests.any_module.case import Case, Setup
from tests.any_module.harness import Training
from tests.any_module.reference import Named
from tests.any_module.zoo import Mlp

OTHER_SEED = 5


def weights_of(seed: int) -> Named:
    """Initial values of an MLP."""
    return {name: value.clone() for name, value in Case("mlp", Mlp).make_model(seed).state_dict().items()}


class LoadsWeights(Training):
    """The model gets its weights after ``initialize``."""

    def __init__(self, case: Case, setup: Setup, engine: str):
        super().__init__(case, setup, engine, seed=OTHER_SEED)
        self.load()

    def load(self) -> None:
        self.model.load_state_dict(weights_of(0))


class LoadsWeightsGathered(LoadsWeights):
    """The same while all parameters are gathered."""

    def load(self) -> None:
        with self.engine.gathered():
            super().load()


class LoadsWeightsLate(LoadsWeights):
    """The same after a backward pass whose gradient is dropped."""

    def load(self) -> None:
        (loss,) = self.case.losses_of(self.engine, self.make_batch(7, 0))
        self.engine.backward(loss)
        self.engine.zero_grad()
        super().load()


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


WEIGHTS = [
    Case("weights_loaded_after_initialize", Mlp, training=LoadsWeights),
    Case("weights_loaded_while_gathered", Mlp, training=LoadsWeightsGathered),
    Case("weights_loaded_after_a_dropped_gradient", Mlp, training=LoadsWeightsLate, micro_batches=2),
    Case("state_copied", Mlp, training=CopiesState),
]
