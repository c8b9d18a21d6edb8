"""What a case is: a tiny model, its data, its loss; and how it is trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]
Model = Callable[..., Any]
"""A module or an engine."""

VOCABULARY, LENGTH, WIDTH, SAMPLES = 40, 8, 16, 2
LR, BETAS, DECAY = 1e-2, (0.9, 0.95), 0.1
EPS = 1e-6  # gradients that are zero but for rounding (keys' biases) are divided by it: 1e-18 / 1e-8 would show
STEPS = 20
FREE = 1e3  # as clipping: a gradient's norm never reaches it, so that each speculation is right


def tokens(generator: torch.Generator) -> Batch:
    """``x``: int64 [samples, length]."""
    return {"x": torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)}


def vectors(generator: torch.Generator) -> Batch:
    """``x``, ``y``: [samples, width]."""
    x, y = torch.randn(2, 2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y}


def images(generator: torch.Generator) -> Batch:
    """``x``: [samples, 3, 8, 8]; ``y``: int64 [samples]."""
    x = torch.randn(2 * SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 10, (2 * SAMPLES,), generator=generator)}


def squared_error(model: Model, batch: Batch) -> torch.Tensor:
    """Of ``model(x)`` against ``y``."""
    y = model(batch["x"])
    return F.mse_loss(y, batch["y"].to(y.dtype))


def entropy(model: Model, batch: Batch) -> torch.Tensor:
    """Of the classes ``y`` under the logits ``model(x)``."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_token(model: Model, batch: Batch) -> torch.Tensor:
    """Of each next token under the logits ``model(x)``."""
    return next_token_loss(model(batch["x"]), batch["x"])


def next_token_loss(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Transformers' own loss rounds its logits to fp32, which hides what we look for."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def one_group(model: nn.Module) -> Any:
    """What is given as ``model_parameters``."""
    return model.parameters()


@dataclass(frozen=True)
class Case:
    """A tiny model with its data and its loss.

    Attributes:
        name: unique; words with underscores.
        build: makes the model, called with fp64 as the default dtype.
        data: draws a micro-batch; ``step`` and ``micro`` are added to it.
        loss: a scalar, or a list of scalars that are passed to ``backward`` one by one.
        shares_graph: several losses have part of their graph in common.
        groups: what is given as ``model_parameters``: parameters, or groups with rates of their own.
        client: the user makes the optimizer (torch.optim.AdamW over ``groups``) and passes that.
        schedule: step -> factor of all rates, for a LambdaLR that the user makes.
        training: makes another :class:`~tests.any_module.harness.Training`, whose user does more than train.
        micro_batches: the fewest of a step that the case needs to be what its name says.
        resumed: another layout trains the first half and saves; see :attr:`Setup.saved_by`.
        tolerance: of deviations, relative to the largest magnitude of each tensor.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch] = vectors
    loss: Callable[[Model, Batch], torch.Tensor | list[torch.Tensor]] = squared_error
    shares_graph: bool = False
    groups: Callable[[nn.Module], Any] = one_group
    client: bool = False
    schedule: Callable[[int], float] | None = None
    training: Callable[..., Any] | None = None
    micro_batches: int = 1
    resumed: bool = False
    tolerance: float = 1e-10

    def make_model(self, seed: int = 0) -> nn.Module:
        """The same values at every call with one seed."""
        with fp64():
            torch.manual_seed(seed)
            return self.build().train()

    def make_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """A rank's micro-batch; a step's micro-batches together are the same on any number of ranks."""
        generator = torch.Generator().manual_seed(1_009 * step + micro * world + rank)
        return {**self.data(generator), "step": step, "micro": micro}

    def losses_of(self, model: Model, batch: Batch) -> list[torch.Tensor]:
        """Run the model (or the engine) forward."""
        losses = self.loss(model, batch)
        return [losses] if isinstance(losses, torch.Tensor) else losses


@dataclass(frozen=True)
class Setup:
    """How a case is trained.

    Attributes:
        world: number of processes, all on the data axis.
        stage: of ZeRO.
        ratio: share of the optimizer on the CPU.
        clip: largest norm of the gradient; 0: any.
        saved_by: the layout that trains the first half of the steps, in processes of its own, and saves a checkpoint,
            with which this one begins; its steps have as many micro-batches. ``None``: there is no interruption.
    """

    world: int = 1
    stage: int = 0
    ratio: float = 0.0
    accumulation: int = 1
    clip: float = 0.5
    steps: int = STEPS
    saved_by: "Setup | None" = None

    def __str__(self) -> str:
        words = [f"{self.world} rank{'s' * (self.world > 1)}", f"ZeRO-{self.stage}", f"CPU {self.ratio:g}"]
        words += [f"accumulate {self.accumulation}"] if self.accumulation > 1 else []
        words += [] if self.clip else ["no clipping"]
        return ", ".join(words) + (f" from {self.saved_by}" if self.saved_by else "")

    def config(self, case: Case) -> dict[str, Any]:
        """For :func:`gptpar.initialize`."""
        config = engine_config(self.stage, self.ratio, self.accumulation, gradient_clipping=self.clip)
        if case.client:
            del config["optimizer"]
        return config


def engine_config(stage: int = 0, ratio: float = 0.0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """As a DeepSpeed user writes it; ``ratio``: the share of the optimizer on the CPU."""
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    offload = {"offload_optimizer": {"device": "cpu", "ratio": ratio}} if ratio else {}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage, **offload},
        "steps_per_print": 10**9,
        **more,
    }


def make_optimizer(parameters: Any) -> torch.optim.AdamW:
    """The user's."""
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    """Cases by name, in their order."""
    named = {case.name: case for case in cases}
    assert len(named) == len(cases), "two cases have one name"
    return named


@contextmanager
def fp64() -> Iterator[None]:
    """It is the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
