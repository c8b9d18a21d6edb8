"""Lists of layers under ``gptpar.initialize``: every number of a plain loop, however they are divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.any_module.pipeline_layers import MICRO_BATCHES, Divided, chained, counted, reference, train
from tests.any_module.rank_pool import RankPool

CUTS = {"partition": "0,3,5,6,10"}
"""For 2 stages of 2 pieces: the layer in the middle is in both pieces of the second one."""

LAYOUTS = [
    Divided(),
    Divided(zero=3, ratio=0.6),
    Divided(ratio=1.0, pipeline={"activation_checkpoint_interval": 2}),
    Divided(2, 1, 0, 1.0),
    Divided(2, 1, 1, 0.6),
    Divided(2, 1, 2, 0.0),
    Divided(2, 1, 3, 0.6, pipeline={"activation_checkpoint_interval": 3}),
    Divided(2, 1, 3, 1.0, offload_param=True),
    Divided(2, 2, 0, 0.0),
    Divided(2, 2, 0, 0.6, pipeline={"partition": "0,4,10"}),
    Divided(2, 2, 1, 1.0, pipeline={"partition": "uniform"}),
    Divided(2, 2, 0, 0.0, virtual=2),
    Divided(2, 2, 0, 0.6, virtual=2, pipeline=CUTS),
    Divided(4, 4, 0, 0.6),
    Divided(4, 4, 3, 0.0, pipeline={"partition": "0,2,3,5,10"}),
    Divided(4, 2, 0, 1.0, virtual=2, pipeline=CUTS),
    Divided(4, 2, 1, 0.6),
    Divided(4, 2, 2, 0.6, virtual=2, pipeline=CUTS),
    Divided(4, 2, 3, 0.0, virtual=2, pipeline=CUTS),
    Divided(4, 2, 3, 0.6, offload_param=True),
]


@pytest.mark.parametrize("divided", LAYOUTS, ids=str)
def test_layers_train_like_a_plain_loop(pools: dict[int, RankPool], divided: Divided) -> None:
    """fp64, 20 steps: losses, whole gradients, norms and weights to 1e-10."""
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
    Divided(4, 2, 1, 0.3),
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
