"""Lists of layers under ``gptpar.initialize``: every number of a plain loop, however they are divided."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptpar.adapter.guards import failed_passes
from gptpar.adapter.modules_used import modules_used
from gptpar.checkpoint.load import read_tensors
from tests.any_module.matrix import Bench
from tests.any_module.pipeline_layers import (
    LENGTH,
    MICRO_BATCHES,
    STEPS,
    VOCABULARY,
    WIDTH,
    Divided,
    chained,
    counted,
    data_of,
    fp64,
    gone_on,
    initialize,
    layers,
    reference,
    take_steps,
    train,
)
from tests.any_module.reference import Named, Trace
from tests.fixtures.write_checkpoints import HERE
from tests.spawn import RanksFailed

CUTS = {"partition": "0,3,5,6,10"}
"""For 2 stages of 2 pieces: the layer in the middle is in both pieces of the second one."""

LAYOUTS = [
    Divided(),
    Divided(ratio=1.0, pipeline={"activation_checkpoint_interval": 2}),
    Divided(2, 1, 3, 0.6, pipeline={"activation_checkpoint_interval": 3}),
    Divided(2, 1, 3, 1.0, offload_param=True),
    Divided(4, 1, 1, 0.3),  # the last process's shards are padding: it has nothing to offload
    Divided(2, 2, 0, 0.0),
    Divided(2, 2, 0, 0.0, virtual=2),
    Divided(2, 2, 0, 0.6, pipeline={"partition": "0,4,10"}),
    Divided(2, 2, 1, 1.0, pipeline={"partition": "uniform"}),
    Divided(4, 4, 0, 0.6),
    Divided(4, 2, 0, 1.0, virtual=2, pipeline=CUTS),
    Divided(4, 2, 2, 0.6, virtual=2, pipeline=CUTS),
    Divided(4, 2, 3, 0.6, offload_param=True),
]


@pytest.mark.parametrize("divided", LAYOUTS, ids=str)
def test_layers_train_like_a_plain_loop(bench: Bench, divided: Divided) -> None:
    """fp64: losses, whole gradients, norms and weights to 1e-10."""
    expected = reference()
    answers = bench.on_ranks(divided.world, train, divided)
    frozen = 0
    for trace, evaluated, mine in answers:
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.norms, expected.norms, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.gradients, expected.gradients, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.weights, expected.weights, rtol=1e-10, atol=1e-10)
        assert evaluated == pytest.approx(expected.losses[0], rel=1e-10)
        frozen += mine.pop("layers.5.shift", None) is not None
        torch.testing.assert_close(mine, {name: expected.weights[-1][name] for name in mine}, rtol=1e-10, atol=1e-10)
    assert frozen == divided.world // divided.stages


RATIOS = [
    Divided(4, 4, 0, 0.5),
    Divided(4, 1, 1, 0.3),
    Divided(4, 2, 0, 0.7, virtual=2, pipeline=CUTS),
    Divided(4, 4, 0, 0.1, pipeline={"partition": "0,2,3,5,10"}),
    Divided(4, 2, 1, 0.9, virtual=2, pipeline=CUTS),
]


def test_any_ratio_of_tied_layers_is_saved_and_goes_on_in_another(bench: Bench, tmp_path: Path) -> None:
    """Stages of other sizes divide a tied layer at the same element, so that a checkpoint holds each element once."""
    expected = reference()
    for trace in bench.on_ranks(4, chained, RATIOS, str(tmp_path)):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.weights, expected.weights, rtol=1e-10, atol=1e-10)


SECOND = Divided(2, 2, pipeline={"partition": "0,4,10"})


@pytest.mark.parametrize(("before", "after"), [(SECOND, SECOND), (SECOND, Divided(2, 1, 1))])
def test_buffers_and_extra_states_of_all_stages_are_saved(
    bench: Bench, tmp_path: Path, before: Divided, after: Divided
) -> None:
    """The first process does not have the layer that counts."""
    found = bench.on_ranks(2, counted, before, after, str(tmp_path))
    layer = [(MICRO_BATCHES, 0.5 + MICRO_BATCHES)]
    assert found == ([layer, layer] if after.stages == 1 else [[], layer])


FORMER = HERE / "engine-one-stage"
"""Three steps of one stage, saved by version e6b9d50^, which named groups, buffers and extra states by position."""


GOING_ON = [Divided(), Divided(ratio=0.6), SECOND, Divided(2, 2, virtual=2, pipeline=CUTS), Divided(2, 1, 3)]


@pytest.mark.parametrize("divided", GOING_ON, ids=str)
def test_a_former_checkpoint_of_one_stage_goes_on_anywhere(bench: Bench, divided: Divided) -> None:
    """Weights and moments bit for bit, buffers and extra states, and the losses that the former version had then."""
    stored, expected = read_tensors(FORMER / "iter_0000003"), json.loads((FORMER / "expected.json").read_text())
    found = bench.on_ranks(divided.world, gone_on, divided, str(FORMER), 3)
    for held, counts, losses in found:
        assert all(torch.equal(value, stored[name]) for name, value in held.items())
        assert set(counts) <= {(expected["calls"], expected["level"])}
        if divided.world == divided.stages:  # data-parallel processes count fewer calls
            torch.testing.assert_close(losses, expected["losses"], rtol=1e-12, atol=0)
    assert sum(len(counts) for _, counts, _ in found) == divided.world // divided.stages


# Functions among the layers that use modules.


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


OF_FUNCTIONS = [
    Divided(zero=3, ratio=0.6),
    Divided(2, 2, 0, 0.0, virtual=2, pipeline={"activation_checkpoint_interval": 2}),
    Divided(4, 2, 1, 0.6),
]


def gpt() -> Gpt:
    torch.manual_seed(3)
    return Gpt()


def in_plain_torch() -> tuple[list[Any], Named]:
    model = gpt()
    return model.to_layers(), dict(model.named_parameters())


def train_functions(rank: int, divided: Divided) -> Trace:
    with fp64():
        engine, trace = initialize(divided, gpt().to_layers()), Trace()
        take_steps(engine, trace, STEPS)
        engine.close()
    return trace


@pytest.mark.parametrize("divided", OF_FUNCTIONS, ids=str)
def test_functions_train_the_modules_that_they_use(bench: Bench, divided: Divided) -> None:
    expected = reference(in_plain_torch)
    for trace in bench.on_ranks(divided.world, train_functions, divided):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-10)
        assert trace.norms == pytest.approx(expected.norms, rel=1e-10)


def test_what_a_function_uses() -> None:
    model, others = Gpt(), [nn.Linear(2, 2), nn.Linear(3, 3)]
    names = [sorted(modules_used(layer)) for layer in model.to_layers() if not isinstance(layer, nn.Module)]
    assert names == [["position", "token"], [], ["bias", "weight"], ["gain"], ["weight"]]
    assert sorted(modules_used(lambda x: [one(x) for one in others])) == ["others0", "others1"]
    assert [*modules_used(functools.partial(F.linear, weight=others[0].weight)).values()] == [others[0].weight]
    assert modules_used(lambda x, layer=model.norm: layer(x)) == {"layer": model.norm}
    assert modules_used(lambda x: sum(p.sum() for p in model.parameters())) == {"model": model}
    assert modules_used(lambda x: x.view(WIDTH, VOCABULARY)) == {}


# An error in ``train_batch``, which the training loop catches before it calls it again.


FAILING = (1, 3)


class Fails(nn.Module):
    """A layer without parameters, in the last stage; ``left`` calls later, one raises."""

    left = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("as it was told to")
        return x


def train_with_errors(rank: int, divided: Divided, *, fails: bool) -> list[float]:
    """The losses; in some steps the second micro-batch fails first."""
    with fp64():
        layer, listed = Fails(), layers()
        engine, losses = initialize(divided, [*listed[:8], layer, *listed[8:]]), []
        for step in range(STEPS):
            if fails and step in FAILING:
                layer.left = 2
                with pytest.raises(torch.OutOfMemoryError, match="as it was told to"):
                    engine.train_batch(data_of(engine, step))
            losses.append(engine.train_batch(data_of(engine, step)).item())
        engine.close()
    return losses


def failing(rank: int, divided: Divided) -> list[float]:
    with patch.object(failed_passes, "WAIT_SECONDS", 0.5):
        return train_with_errors(rank, divided, fails=True)


def undisturbed(rank: int, divided: Divided) -> list[float]:
    return train_with_errors(rank, divided, fails=False)


@pytest.mark.parametrize("divided", [Divided(1, 1, 0, 0.6), Divided(2, 1, 2), Divided(2, 1, 3, 1.0)], ids=str)
def test_what_fails_on_all_processes_leaves_nothing_behind(bench: Bench, divided: Divided) -> None:
    assert bench.on_ranks(divided.world, failing, divided) == bench.on_ranks(divided.world, undisturbed, divided)


def test_what_fails_in_one_stage_is_told(bench: Bench) -> None:
    with pytest.raises(RanksFailed) as caught:  # which ends the processes
        bench.on_ranks(2, failing, Divided(2, 2, 1))
    told = "rank 0 told of none within 0.5 seconds, rank 1 met an error in train_batch of step 2, micro-batch 1"
    assert told in caught.value.reports[1]
