"""When the CPU optimizer gets the gradients of a user's module, and in which order it updates its units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.units import ALONE
from gptpar.offload.events import EventLog, What
from tests.offload_log import logged

WIDTH = 32
HEAD = ALONE // WIDTH  # so that embedding and head are units of their own


class Model(nn.Module):
    """Embedding, blocks, norm and an untied head, defined in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HEAD, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HEAD, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).logsumexp(-1).mean()


@pytest.fixture(scope="module")
def log() -> EventLog:
    """Of three steps with everything on the CPU."""
    with logged() as events:
        torch.manual_seed(0)
        zero = {"offload_optimizer": {"device": "cpu"}}
        adam = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": zero}
        engine, *_ = gptpar.initialize(model=Model(), config=config)
        for _ in range(3):
            engine.backward(engine(torch.arange(10).view(2, 5)))
            engine.step()
        engine.close()
    return events


def last_step(log: EventLog, *what: What) -> list[str]:
    """The units of such events in the last step, each at its first."""
    begin = [place for place, event in enumerate(log.events) if event.what is What.STEP_TAKEN][-2]
    return list(dict.fromkeys(event.unit for event in log.events[begin:] if event.what in what))


def test_the_step_begins_with_what_the_next_forward_pass_waits_for_first(log: EventLog) -> None:
    """The whole model's units are brought before the first block is called; norm and head are among them."""
    order = last_step(log, What.UPDATE_BEGUN, What.COMMITTED)
    assert order == ["embedding.weight", "(root)", "head.weight", "blocks.0", "blocks.1"]


def test_each_gradient_is_submitted_when_it_is_complete(log: EventLog) -> None:
    """The head's comes first, so that it is not updated at the end of the step."""
    submitted = last_step(log, What.SUBMITTED)
    assert submitted == ["head.weight", "(root)", "blocks.1", "blocks.0", "embedding.weight"]
