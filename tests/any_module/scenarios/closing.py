"""The user closes an engine, and trains the module in another one."""

from dataclasses import replace
from functools import partial

import torch

from gptpar.errors import GptparError
from tests.any_module.case import Batch, Case, Setup
from tests.any_module.harness import Training, initializer
from tests.any_module.reference import Trace
from tests.any_module.scenarios.weights import OTHER_SEED, weights_of
from tests.any_module.zoo import Mlp


class Again(Training):
    """Takes the first step in one engine, and the others in another one of another configuration."""

    def __init__(self, case: Case, setup: Setup, engine: str):
        super().__init__(case, replace(setup, stage=1, ratio=0.6), engine)
        for group in self.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        self.run(0, 1)
        self.engine.close()
        self.begin_anew(setup, engine)

    def begin_anew(self, setup: Setup, engine: str) -> None:
        """With another engine for the same module."""
        self.setup, self.trace = setup, Trace()
        self.engine, self.optimizer, _, self.scheduler = self._initialize(initializer(engine))


class ClosesInAStep(Again):
    """Closes an engine within its second step, after some of its verbs; the module has the first step's weights."""

    def __init__(self, case: Case, setup: Setup, engine: str, after: tuple[str, ...]):
        Training.__init__(self, case, setup, engine, seed=OTHER_SEED)
        (wanted,) = self.run(0, 1).weights
        batch = self.make_batch(1, 0)
        for verb in after:
            self._do(verb, batch)
        self.engine.close()
        self.engine.close()
        assert all(torch.equal(value, wanted[name]) for name, value in self.model.named_parameters())
        self._assert_closed(batch)
        self.model.load_state_dict(weights_of(0))
        self.begin_anew(setup, engine)

    def _do(self, verb: str, batch: Batch) -> None:
        if verb == "forward":
            (self.loss,) = self.case.losses_of(self.engine, batch)
        elif verb == "backward":
            self.engine.backward(self.loss)
        else:
            self.engine.step()

    def _assert_closed(self, batch: Batch) -> None:
        for act in (lambda: self.engine(batch["x"]), lambda: self.engine.backward(self.loss), self.engine.step):
            try:
                act()
            except GptparError as error:
                assert "the engine is closed" in str(error), error
            else:
                raise AssertionError("a closed engine trains")


def closed(name: str, *after: str) -> Case:
    """A case of two micro-batches, so that closing between them is within a step."""
    return Case(name, Mlp, training=partial(ClosesInAStep, after=after), micro_batches=2)


CLOSING = [
    Case("trained_on_in_another_engine", Mlp, training=Again),
    closed("closed_after_forward", "forward"),
    closed("closed_after_backward", "forward", "backward"),
    closed("closed_between_micro_batches", "forward", "backward", "step"),
    closed("closed_before_step", "forward", "backward", "step", "forward", "backward"),
]
