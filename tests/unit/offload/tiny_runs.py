"""Steps of the tiny model, and all that they leave."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gptpar.data.loader import MicroBatch
from gptpar.run.trainer import Trainer
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.unit.offload.host_optimizers import wait_for_speculation

OFFLOAD = "--cpu-optimizer --cpu-optimizer-ratio"
ALL = f"{OFFLOAD} 1"
RATIOS = ["0", "0.731", "1"]
"""None of them cuts between parameters."""


def config_words(words: str) -> str:
    return f"--global-batch-size 4 --lr-warmup-iters 3 --weight-decay 0.1 {words}"


def any_tokens(step: int) -> torch.Tensor:
    return random_tokens(4, 16, 60, seed=step)


def batches(step: int, count: int, tokens: Callable[[int], torch.Tensor] = any_tokens) -> list[MicroBatch]:
    return [MicroBatch(t[:, :-1], t[:, 1:]) for t in tokens(step).split(4 // count)]


def train(
    trainer: Trainer, first: int, last: int, count: int = 2, tokens: Callable[[int], torch.Tensor] = any_tokens
) -> list[list[float]]:
    """Loss, norm and skipped of each step; the schedule follows the step. Even steps wait for speculation."""
    seen = []
    for step in range(first, last):
        trainer.expect_step(4.0 * step)
        loss = trainer.forward_backward(batches(step, count, tokens), step)
        if trainer.host is not None and step % 2 == 0:
            wait_for_speculation(trainer.host)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
        numbers = launched.readings.read()
        trainer.loss_scale.update(bool(numbers[2]))
        seen.append(numbers[:3])
    return seen


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The master weights, moments and model parameters that a process holds, each in one piece."""
    state = {}
    for kind, views in sorted(trainer.engine.optimizer.state_tensors().items()):
        for name, view in sorted(views.items()):
            elements = [part.flatten().clone() for _, part in sorted(view.parts, key=lambda item: item[0])]
            state[f"{kind}/{name}"] = torch.cat(elements)
    for unit in trainer.engine.table.units:
        state[f"live/{unit.name}"] = trainer.engine.parameters.shards[unit.name].clone()
    return state


def hash_of(trainer: Trainer) -> str:
    state = hashlib.sha256()
    for name, values in state_of(trainer).items():
        state.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@dataclass
class Run:
    """A run that has ended.

    Attributes:
        steps: see :func:`train`.
        redone: buckets whose speculation was wrong.
    """

    trainer: Trainer
    steps: list[list[float]]
    state: dict[str, torch.Tensor]
    redone: int

    @property
    def losses(self) -> list[float]:
        return [loss for loss, _, _ in self.steps]

    @property
    def norms(self) -> list[float]:
        return [norm for _, norm, _ in self.steps]

    @property
    def skipped(self) -> list[bool]:
        return [bool(skipped) for *_, skipped in self.steps]

    def clips_some(self, most: float) -> bool:
        return any(norm > most for norm in self.norms) and any(norm < most for norm in self.norms)

    def skips_some(self) -> bool:
        return any(self.skipped) and not all(self.skipped)


def run_of(words: str, steps: int, count: int = 2, tokens: Callable[[int], torch.Tensor] = any_tokens) -> Run:
    """A whole run."""
    trainer = make_trainer(tiny_config(config_words(f"--micro-batch-size {4 // count} {words}")))
    seen = train(trainer, 0, steps, count, tokens)
    trainer.engine.finish()
    state, host = state_of(trainer), trainer.host
    trainer.close()
    return Run(trainer, seen, state, 0 if host is None else host.num_redone)


def assert_same_state(one: Run, other: Run) -> None:
    """Bit for bit."""
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        assert torch.equal(values, other.state[name]), name


def assert_same(one: Run, other: Run) -> None:
    assert repr(one.steps) == repr(other.steps)  # a norm may be NaN
    assert_same_state(one, other)
