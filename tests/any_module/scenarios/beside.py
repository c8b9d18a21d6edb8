"""What users do beside training that must not change it."""

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR

from tests.any_module.case import WIDTH, Batch, Case, Model
from tests.any_module.harness import Training
from tests.any_module.reference import Trace, copy_of_buffers, copy_of_weights, mean_over_ranks
from tests.any_module.zoo import Mlp

DECAY_OF_RATE = 0.9


class LossInside(Mlp):
    """Returns its loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), y)


def falling(step: int) -> float:
    return DECAY_OF_RATE**step


def loss_inside(model: Model, batch: Batch) -> torch.Tensor:
    return model(batch["x"], batch["y"])


class ForwardWithoutBackward(Training):
    """Forward passes whose graphs are dropped, or kept for some steps."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        self.kept = [*getattr(self, "kept", [])[-2:], self.engine(self.make_batch(step + 7, micro)["x"])]
        self.engine(self.make_batch(step + 8, micro)["x"])


class EvaluatesBetween(Training):
    """Evaluates before each micro-batch, so also between those of a step; the losses are those of the weights."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        batches = [self.make_batch(step + 100, micro) for micro in range(self.setup.accumulation)]
        loss = self.evaluate(batches)
        assert self.model.training and not loss.requires_grad
        torch.testing.assert_close(mean_over_ranks(loss.item()), self.wanted(batches), rtol=1e-12, atol=0)

    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        """This process's mean loss."""
        self.engine.eval()
        assert not self.model.training
        with torch.no_grad():
            losses = [self.case.losses_of(self.engine, batch)[0] for batch in batches]
        self.engine.train()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def wanted(self, batches: list[Batch]) -> float:
        """The mean loss of the weights that the step before gave."""
        plain = self.case.make_model()
        if self.trace.weights:
            plain.load_state_dict(self.trace.weights[-1])
        return mean_over_ranks(sum(self.case.losses_of(plain, one)[0].item() for one in batches) / len(batches))


class EvaluatesByBatch(EvaluatesBetween):
    """The same by ``eval_batch``, which gives the mean over processes."""

    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        return self.engine.eval_batch(iter([(batch["x"], batch["y"]) for batch in batches]))


class ReadsGradientsSoFar(Training):
    """Reads gradients after each micro-batch; before the step's last one they are those of the step so far."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        super().backward(loss, micro)
        if micro == self.setup.accumulation - 1:
            return
        plain = self.case.make_model()
        if self.trace.weights:
            plain.load_state_dict(self.trace.weights[-1])
        for one, rank in itertools.product(range(micro + 1), range(self.setup.world)):
            for part in self.case.losses_of(plain, self.case.make_batch(self.number, one, rank, self.setup.world)):
                (part / (self.setup.accumulation * self.setup.world)).backward(retain_graph=True)
        for name in self.trainable:
            wanted = plain.get_parameter(name).grad
            wanted = torch.zeros_like(plain.get_parameter(name)) if wanted is None else wanted
            torch.testing.assert_close(self._gradient(name), wanted, rtol=1e-9, atol=1e-12)

    def before_micro_batch(self, step: int, micro: int) -> None:
        self.number = step


class NoSync(Training):
    """As loops of DistributedDataParallel: micro-batches but the last one under no_sync, zero_grad after each step."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        last = micro == self.setup.accumulation - 1
        with nullcontext() if last else self.engine.no_sync():
            self.engine.backward(loss)

    def after_step(self, step: int) -> None:
        self.engine.zero_grad()
        self.optimizer.zero_grad()


class LossBackward(Training):
    """``loss.backward()`` in place of ``engine.backward(loss)``."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        loss.backward()

    def backward_before_last(self, loss: torch.Tensor) -> None:
        with self.engine.no_sync():
            loss.backward(retain_graph=self.case.shares_graph)


class LossBackwardAmongOthers(LossBackward):
    """The same before and after gradients with respect to the input, which form none of parameters."""

    def backward(self, loss: torch.Tensor, micro: int) -> None:
        self._differentiate_input()
        super().backward(loss, micro)
        self._differentiate_input()
        if self.setup.stage == 0 and not self.setup.ratio:
            assert all(p.grad is not None for p in self.model.parameters())

    def _differentiate_input(self) -> None:
        x = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.grad(self.engine(x).sum(), x)[0].abs().sum() > 0


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


class TrainsByBatch(Training):
    """``train_batch`` over an iterator in place of forward, backward and step."""

    def _initialize(self, initialize: Any) -> Any:
        made = super()._initialize(initialize)
        made[1].register_step_pre_hook(self._see_gradients)
        return made

    def _see_gradients(self, *_: object) -> None:
        self.trace.gradients.append({name: self._gradient(name) for name in self.trainable})

    def run(self, start: int, stop: int) -> Trace:
        for step in range(start, stop):
            self.trace.losses.append(mean_over_ranks(float(self.engine.train_batch(self.batches(step)))))
            self.trace.norms.append(float(self.engine.get_global_grad_norm()))
            with self.engine.gathered():
                self.trace.weights.append(copy_of_weights(self.model))
        self.trace.buffers = copy_of_buffers(self.model)
        return self.trace

    def batches(self, step: int) -> Any:
        """An iterator over this process's micro-batches of a step."""
        made = (self.make_batch(step, micro) for micro in range(self.setup.accumulation))
        return iter([(batch["x"], batch["y"]) for batch in made])


BESIDE = [
    Case("forward_without_backward", Mlp, training=ForwardWithoutBackward, micro_batches=2),
    Case("evaluation_during_accumulation", Mlp, training=EvaluatesBetween, micro_batches=2),
    Case("eval_batch_during_accumulation", LossInside, loss=loss_inside, training=EvaluatesByBatch, micro_batches=2),
    Case("no_sync", Mlp, training=NoSync, micro_batches=2),
    Case("loss_backward", Mlp, training=LossBackwardAmongOthers),
    Case("users_scheduler", Mlp, schedule=falling, training=UsersScheduler),
    Case("train_batch", LossInside, loss=loss_inside, training=TrainsByBatch),
]
