"""Layers in a pipeline: number formats, modules that exist already, and what is refused, on every stage alike."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar import LayerSpec, PipelineModule
from gptpar.errors import ConfigError, GptparError, ModelError
from tests.any_module.matrix import Bench
from tests.any_module.on_rank import said
from tests.any_module.pipeline_layers import (
    INNER,
    MICRO_BATCHES,
    WIDTH,
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
from tests.any_module.reference import Named


def trained(engine: Any, data: Any, steps: int) -> tuple[list[float], Named]:
    """(losses, this process's parameters after these steps)"""
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    found = parameters_here(engine)
    engine.close()
    return losses, found


def narrow(rank: int, stages: int, keys: dict[str, Any], specs: list[Any]) -> tuple[list[float], Named]:
    engine, *_ = gptpar.initialize(model=specs, loss_fn=square, config=small_config(stages, **keys))
    return trained(engine, vectors(torch.float32), 4)


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
    bench: Bench, keys: dict[str, Any], dtypes: tuple, dtype_after: torch.dtype | None
) -> None:
    """Two stages give the numbers of one; what goes between them has the layers' format."""
    specs = chain(dtypes=dtypes)
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.6}}}
    losses, whole = bench.on_ranks(1, narrow, 1, keys, specs)[0]
    divided = bench.on_ranks(2, narrow, 2, {**keys, **offload}, specs)
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
        engine, *_ = gptpar.initialize(model=pipeline, optimizer=torch.optim.AdamW, config=config)
        losses, found = trained(engine, vectors(torch.float64), 3)
        same = all(p is q for p, q in zip(mine, first.parameters(), strict=False))
    assert all(torch.isfinite(value).all() for value in found.values())
    return losses, same


def test_modules_that_exist_stay_the_users(bench: Bench) -> None:
    """Stages 2 and 4 of 4 have no parameters."""
    losses, _ = bench.on_ranks(1, modules_that_exist, 1, 0)[0]
    for world, stages, zero in ((4, 4, 0), (2, 2, 3), (2, 2, 0)):
        for found, same in bench.on_ranks(world, modules_that_exist, stages, zero):
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


class Queries(nn.Module):
    """Learned vectors, whatever it gets: what a stage sends on is freed, if nobody owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries


def learned_queries(rank: int, stages: int) -> tuple[list[float], Named]:
    with fp64():
        torch.manual_seed(4)
        model = PipelineModule([Queries(), nn.Linear(4, 1)], num_stages=stages, loss_fn=square)
        engine, *_ = gptpar.initialize(model=model, config={**small_config(stages), "pipeline": {}})
        return trained(engine, itertools.repeat((torch.zeros(3, 4), torch.zeros(3, 1))), 3)


def test_a_parameter_that_a_stage_returns_keeps_its_values(bench: Bench) -> None:
    ((losses, weights),) = bench.on_ranks(1, learned_queries, 1)
    first, last = bench.on_ranks(2, learned_queries, 2)
    for of_rank, here in (first, last):
        torch.testing.assert_close(of_rank, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(here, {name: weights[name] for name in here}, rtol=1e-12, atol=0)
    assert "layers.0.queries" in first[1] and losses[0] > losses[-1]


# What is refused.


outside = nn.Linear(WIDTH, WIDTH)


def initialize(model: Any, config: dict[str, Any] | None = None, **more: Any) -> Any:
    return gptpar.initialize(model=model, config=config or small_config(1), **{"loss_fn": square, **more})[0]


def test_only_whole_steps() -> None:
    engine = initialize(chain())
    for verb in (lambda: engine(torch.ones(3, WIDTH)), lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(GptparError, match=r"^a pipeline takes whole steps: call engine.train_batch\(data_iter\)"):
            verb()
    with pytest.raises(GptparError, match="full_gradient.. works only between"):
        engine.full_gradient("layers.0.weight")
    with pytest.raises(GptparError, match="called under torch.no_grad"), torch.no_grad():
        engine.train_batch(vectors(torch.float32))
    pair = torch.ones(3, WIDTH), torch.ones(3, WIDTH)
    with pytest.raises(GptparError, match=r"inputs a tensor, and not \(a tuple, a float32 tensor of shape \(3, 6\)"):
        engine.train_batch(iter([(pair, pair[1])] * 2))
    with pytest.raises(GptparError, match=r"inputs a tensor, and not a float32 tensor of shape \(3, 6\)"):
        engine.train_batch(iter(pair))
    assert engine.train_batch(iter([pair] * 2)).isfinite()
    engine.close()
    with pytest.raises(GptparError, match="the engine is closed"):
        engine.train_batch(iter([pair] * 2))


def test_a_loss_is_a_scalar() -> None:
    engine = initialize(chain(), loss_fn=None)
    with pytest.raises(GptparError, match=r"last layer returned a tensor of shape \(3, 6\), which is no loss: pass"):
        engine.train_batch(vectors(torch.float32))
    engine.close()


def test_parameters_that_layers_share_in_silence() -> None:
    linear, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = linear.weight
    with pytest.raises(ModelError, match="layers.0 and layers.2 share the parameter weight: write both as"):
        initialize([linear, torch.tanh, head])


def test_functions_that_use_several_layers() -> None:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    both = functools.partial(lambda x, weight: x @ weight + one.bias, weight=other.weight)
    with pytest.raises(ConfigError) as caught:
        initialize([one, other, both, lambda x: one(x) + outside.weight[0]])
    mixed, partial = (f"layers.{n} is a function that uses parameters of several layers" for n in (2, 3))
    assert caught.value.problems[0].startswith(f"{mixed} (layers.0, layers.1): make it a layer that has them, or write")
    assert caught.value.problems[1].startswith(f"{partial} (no layer, layers.0): make it a layer that has them, or")


def test_configurations_that_do_not_fit_the_layers() -> None:
    def problems(model: Any, config: dict[str, Any], **more: Any) -> list[str]:
        with pytest.raises((ConfigError, ModelError)) as caught:
            initialize(model, config, **more)
        return caught.value.problems

    pipeline, stages = PipelineModule(chain(), 1, loss_fn=square), "config: pipeline.stages"
    assert problems(chain(), small_config(3)) == [
        f"{stages} is 3, and 1 process(es) are no multiple of it: start a multiple."
    ]
    assert problems(chain(), small_config(0)) == [f"{stages} is 0: at least 1 is needed."]
    assert problems(chain(), small_config(1, gptpar={"virtual_stages": 2, "units": ["A"], "step_graph": True})) == [
        "config: gptpar.units: the layers of a pipeline are its units: drop the key.",
        "config: gptpar.step_graph is true: steps of a pipeline of layers are not recorded: drop the key.",
        "config: gptpar.virtual_stages is 2: it needs pipeline.stages of at least 2.",
    ]
    (problem,) = problems(nn.Linear(2, 2), small_config(2))
    assert problem.startswith(f"{stages} 2: the model is no list of layers: drop it, or pass the list")
    (problem,) = problems(pipeline, small_config(1))
    assert problem.startswith("loss_fn is passed beside a PipelineModule")
    assert problems(pipeline, small_config(2), loss_fn=None)[0].startswith(f"{stages} 2: the model is a PipelineModule")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def test_what_one_stage_refuses_all_refuse(bench: Bench) -> None:
    """No process waits for another that has given up."""
    first, last = bench.on_ranks(2, said, initialize, [*chain(), LayerSpec(Complex)], small_config(2))
    assert first == last and "layer layers.4: the parameter weight is complex" in first
