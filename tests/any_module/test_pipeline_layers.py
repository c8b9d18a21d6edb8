"""Lists of layers under ``gptpar.initialize``: every number of a plain loop, however they are divided."""

import json
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint.load import read_tensors
from tests.any_module.pipeline_layers import (
    MICRO_BATCHES,
    Divided,
    chained,
    counted,
    gone_on,
    learned_queries,
    reference,
    train,
)
from tests.fixtures.write_checkpoints import HERE
from tests.spawn import RankPool

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
def test_layers_train_like_a_plain_loop(pools: dict[int, RankPool], divided: Divided) -> None:
    """fp64: losses, whole gradients, norms and weights to 1e-10."""
    expected = reference()
    answers = pools[divided.world].run(train, divided)
    frozen = 0
    for trace, evaluated, mine in answers:
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.norms, expected.norms, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.gradients, expected.gradients, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.weights, expected.weights, rtol=1e-10, atol=1e-10)
        assert evaluated == pytest.approx(expected.losses[0], rel=1e-10)
        for name, value in mine.items():
            if name in expected.weights[-1]:
                torch.testing.assert_close(value, expected.weights[-1][name], rtol=1e-10, atol=1e-10)
            else:
                frozen += name == "layers.5.shift"
    assert frozen == divided.world // divided.stages


RATIOS = [
    Divided(4, 4, 0, 0.5),
    Divided(4, 1, 1, 0.3),
    Divided(4, 2, 0, 0.7, virtual=2, pipeline=CUTS),
    Divided(4, 4, 0, 0.1, pipeline={"partition": "0,2,3,5,10"}),
    Divided(4, 2, 1, 0.9, virtual=2, pipeline=CUTS),
]


def test_any_ratio_of_tied_layers_is_saved_and_goes_on_in_another(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Stages of other sizes divide a tied layer at the same element, so that a checkpoint holds each element once."""
    expected = reference()
    for trace in pools[4].run(chained, RATIOS, str(tmp_path)):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace.weights, expected.weights, rtol=1e-10, atol=1e-10)


SECOND = Divided(2, 2, pipeline={"partition": "0,4,10"})


@pytest.mark.parametrize(("before", "after"), [(SECOND, SECOND), (SECOND, Divided(2, 1, 1))])
def test_buffers_and_extra_states_of_all_stages_are_saved(
    pools: dict[int, RankPool], tmp_path: Path, before: Divided, after: Divided
) -> None:
    """The first process does not have the layer that counts."""
    found = pools[2].run(counted, before, after, str(tmp_path))
    layer = [(MICRO_BATCHES, 0.5 + MICRO_BATCHES)]
    assert found == ([layer, layer] if after.stages == 1 else [[], layer])


FORMER = HERE / "engine-one-stage"
"""Three steps of one stage, saved by version e6b9d50^, which named groups, buffers and extra states by position."""


GOING_ON = [Divided(), Divided(ratio=0.6), SECOND, Divided(2, 2, virtual=2, pipeline=CUTS), Divided(2, 1, 3)]


@pytest.mark.parametrize("divided", GOING_ON, ids=str)
def test_a_former_checkpoint_of_one_stage_goes_on_anywhere(pools: dict[int, RankPool], divided: Divided) -> None:
    """Weights and moments bit for bit, buffers and extra states, and the losses that the former version had then."""
    stored, expected = read_tensors(FORMER / "iter_0000003"), json.loads((FORMER / "expected.json").read_text())
    found = pools[divided.world].run(gone_on, divided, str(FORMER), 3)
    for held, counts, losses in found:
        assert all(torch.equal(value, stored[name]) for name, value in held.items())
        assert set(counts) <= {(expected["calls"], expected["level"])}
        if divided.world == divided.stages:  # data-parallel processes count fewer calls
            torch.testing.assert_close(losses, expected["losses"], rtol=1e-12, atol=0)
    assert sum(len(counts) for _, counts, _ in found) == divided.world // divided.stages


def test_a_parameter_that_a_stage_returns_keeps_its_values(pools: dict[int, RankPool]) -> None:
    """Learned queries, for one: what a stage sends on is freed, if nobody owns it."""
    losses, weights = pools[1].run(learned_queries, 1)[0]
    for of_rank, _ in pools[2].run(learned_queries, 2):
        torch.testing.assert_close(of_rank, losses, rtol=1e-12, atol=0)
    here = pools[2].run(learned_queries, 2)[0][1]
    torch.testing.assert_close(here, {name: weights[name] for name in here}, rtol=1e-12, atol=0)
    assert "layers.0.queries" in here and losses[0] > losses[-1]
