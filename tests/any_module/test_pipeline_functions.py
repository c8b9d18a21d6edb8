"""Functions among a pipeline's layers that use modules: every number of a plain loop, however the list is divided."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar.adapter.modules_used import modules_used
from tests.any_module.pipeline_layers import (
    ADAM,
    CLIP,
    LENGTH,
    MICRO_BATCHES,
    VOCABULARY,
    WIDTH,
    Divided,
    data_of,
    fp64,
    loss_of,
    micro_batch,
)
from tests.spawn import RankPool

NUM_STEPS = 3


class Gpt(nn.Module):
    """Its embeddings are in no list of layers; its head is a function of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.token.weight)

    def to_layers(self) -> list[Any]:
        first = self.blocks[0]
        return [
            lambda tokens: self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)),
            *self.blocks,
            torch.tanh,
            lambda x: x @ first.weight * 0.5 + first.bias,
            lambda x: x * self.gain,
            self.norm,
            self.head,
        ]


LAYOUTS = [
    Divided(zero=3, ratio=0.6),
    Divided(2, 2, 0, 0.0, virtual=2, pipeline={"activation_checkpoint_interval": 2}),
    Divided(4, 2, 1, 0.6),
]


@functools.cache
def reference() -> tuple[list[float], list[float]]:
    with fp64():
        torch.manual_seed(3)
        model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    losses, norms = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        found = 0.0
        for place in range(MICRO_BATCHES):
            x, labels = micro_batch(step, place)
            for layer in model.to_layers():
                x = layer(x)
            loss = loss_of(x, labels) / MICRO_BATCHES
            loss.backward()
            found += loss.item()
        losses.append(found)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return losses, norms


def train(rank: int, divided: Divided) -> tuple[list[float], list[float]]:
    with fp64():
        torch.manual_seed(3)
        engine, *_ = gptpar.initialize(model=Gpt().to_layers(), loss_fn=loss_of, config=divided.config())
        data, losses, norms = data_of(engine), [], []
        for _ in range(NUM_STEPS):
            losses.append(engine.train_batch(data).item())
            norms.append(engine.get_global_grad_norm())
        engine.close()
    return losses, norms


@pytest.mark.parametrize("divided", LAYOUTS, ids=str)
def test_functions_train_the_modules_that_they_use(pools: dict[int, RankPool], divided: Divided) -> None:
    for losses, norms in pools[divided.world].run(train, divided):
        assert losses == pytest.approx(reference()[0], rel=1e-10)
        assert norms == pytest.approx(reference()[1], rel=1e-10)


def test_what_a_function_uses() -> None:
    model, others = Gpt(), [nn.Linear(2, 2), nn.Linear(3, 3)]
    names = [sorted(modules_used(layer)) for layer in model.to_layers() if not isinstance(layer, nn.Module)]
    assert names == [["position", "token"], [], ["bias", "weight"], ["gain"], ["weight"]]
    assert sorted(modules_used(lambda x: [one(x) for one in others])) == ["others0", "others1"]
    assert [*modules_used(functools.partial(F.linear, weight=others[0].weight)).values()] == [others[0].weight]
    assert modules_used(lambda x, layer=model.norm: layer(x)) == {"layer": model.norm}
    assert modules_used(lambda x: sum(p.sum() for p in model.parameters())) == {"model": model}
    assert modules_used(lambda x: x.view(WIDTH, VOCABULARY)) == {}
