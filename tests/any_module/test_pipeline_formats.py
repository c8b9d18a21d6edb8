"""Layers in a pipeline: number formats, and modules that exist already."""

from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar import PipelineModule
from tests.any_module.pipeline_layers import (
    INNER,
    MICRO_BATCHES,
    WIDTH,
    Named,
    chain,
    fp64,
    layers,
    loss_of,
    micro_batch,
    parameters_here,
    reference,
    small_config,
    square,
    vectors,
)
from tests.spawn import RankPool


def narrow(rank: int, stages: int, keys: dict[str, Any], specs: list[Any]) -> tuple[list[float], Named]:
    engine, _, _, _ = gptpar.initialize(model=specs, loss_fn=square, config=small_config(stages, **keys))
    data = vectors(torch.float32)
    losses = [engine.train_batch(data).item() for _ in range(4)]
    found = parameters_here(engine)
    engine.close()
    return losses, found


@pytest.mark.parametrize(
    ("keys", "dtypes", "dtype_after"),
    [
        ({"bf16": {"enabled": True, "auto_cast": True}}, (None, None), torch.bfloat16),
        ({"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 128}}, (None, None), torch.float16),
        ({}, (torch.float32, torch.float64), None),
    ],
    ids=["bf16", "fp16", "fp32 beside fp64"],
)
def test_number_formats_do_not_depend_on_the_stages(
    pools: dict[int, RankPool], keys: dict[str, Any], dtypes: tuple, dtype_after: torch.dtype | None
) -> None:
    """Two stages give the numbers of one; what goes between them has the layers' format."""
    specs = chain(dtypes=dtypes)
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.6}}}
    losses, whole = pools[1].run(narrow, 1, keys, specs)[0]
    divided = pools[2].run(narrow, 2, {**keys, **offload}, specs)
    assert losses[-1] < losses[0]
    merged: Named = {}
    for stage_losses, found in divided:
        assert stage_losses == losses
        merged |= found
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-14, atol=1e-15)  # the norm is summed in other parts
        assert dtype_after in (None, value.dtype)


def modules_that_exist(rank: int, stages: int, zero: int) -> tuple[list[float], bool]:
    """The user's own modules in the list, and a stage without parameters."""
    with fp64():
        torch.manual_seed(3)
        first, last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        mine = list(first.parameters()) if rank == 0 else []
        model: list[Any] = [first, torch.relu, torch.tanh, lambda x: 2 * x, last, nn.Identity(), torch.sin, torch.cos]
        config = small_config(stages, zero_optimization={"stage": zero})
        pipeline = PipelineModule(model, stages, loss_fn=square, partition_method="uniform")
        config.pop("pipeline")
        engine, optimizer, _, _ = gptpar.initialize(model=pipeline, optimizer=torch.optim.AdamW, config=config)
        data = vectors(torch.float64)
        losses = [engine.train_batch(data).item() for _ in range(3)]
        state = engine.module.state_dict()
        same = all(p is q for p, q in zip(mine, first.parameters(), strict=False))
        engine.close()
    assert all(torch.isfinite(value).all() for value in state.values())
    return losses, same


def test_modules_that_exist_stay_the_users(pools: dict[int, RankPool]) -> None:
    """Stages 2 and 4 of 4 have no parameters."""
    losses, _ = pools[1].run(modules_that_exist, 1, 0)[0]
    for world, stages, zero in ((4, 4, 0), (2, 2, 3), (2, 2, 0)):
        for found, same in pools[world].run(modules_that_exist, stages, zero):
            assert same
            assert found == pytest.approx(losses, rel=1e-12)


def test_a_pipeline_module_trains_without_the_engine_as_before() -> None:
    """Its own train_batch leaves gradients for the user's optimizer."""
    with fp64():
        pipeline = PipelineModule(layers(), 1, loss_fn=loss_of)
        loss = pipeline.train_batch([micro_batch(0, place) for place in range(MICRO_BATCHES)])
    assert loss.item() == pytest.approx(reference().losses[0], rel=1e-12)
    (stage,) = pipeline.stages_here
    for name, grad in reference().gradients[0].items():
        torch.testing.assert_close(stage.global_parameters()[name].grad, grad, rtol=1e-10, atol=1e-10)
