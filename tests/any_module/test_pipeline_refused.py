"""Lists of layers under ``gptpar.initialize``: what is refused, on every stage alike."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar import LayerSpec, PipelineModule
from gptpar.errors import ConfigError, GptparError, ModelError
from tests.any_module.pipeline_layers import WIDTH, chain, small_config, square, vectors
from tests.spawn import RankPool

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
    with pytest.raises(ModelError) as caught:
        initialize([linear, torch.tanh, head])
    assert caught.value.problems == [
        "layers.0 and layers.2 share the parameter weight: write both as TiedLayerSpec(key, ...), so that stages which "
        "both have it sum its gradients."
    ]


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

    pipeline = PipelineModule(chain(), 1, loss_fn=square)
    assert problems(chain(), small_config(3)) == [
        "config: pipeline.stages is 3, and 1 process(es) are no multiple of it: start a multiple."
    ]
    assert problems(chain(), small_config(0)) == ["config: pipeline.stages is 0: at least 1 is needed."]
    assert problems(chain(), small_config(1, gptpar={"virtual_stages": 2, "units": ["A"], "step_graph": True})) == [
        "config: gptpar.units: the layers of a pipeline are its units: drop the key.",
        "config: gptpar.step_graph is true: steps of a pipeline of layers are not recorded: drop the key.",
        "config: gptpar.virtual_stages is 2: it needs pipeline.stages of at least 2.",
    ]
    assert problems(nn.Linear(2, 2), small_config(2)) == [
        "config: pipeline.stages 2: the model is no list of layers: drop it, or pass the list of layers as the model."
    ]
    assert problems(pipeline, small_config(1)) == [
        "loss_fn is passed beside a PipelineModule: pass it to the PipelineModule"
    ]
    assert problems(pipeline, small_config(2), loss_fn=None)[0].startswith(
        "config: pipeline.stages 2: the model is a PipelineModule, which has its own"
    )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def refuses(rank: int, specs: list[Any]) -> str:
    try:
        initialize(specs, small_config(2))
    except ModelError as error:
        return str(error.problems)
    raise AssertionError("it was accepted")


def test_what_one_stage_refuses_all_refuse(pools: dict[int, RankPool]) -> None:
    """No process waits for another that has given up."""
    first, last = pools[2].run(refuses, [*chain(), LayerSpec(Complex)])
    assert first == last and "layer layers.4: the parameter weight is complex" in first
