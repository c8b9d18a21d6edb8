"""Lists of layers under ``gptpar.initialize``: every number of a plain loop, however they are divided."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar import LayerSpec, PipelineModule, TiedLayerSpec
from gptpar.errors import ConfigError, GptparError, ModelError
from gptpar.topology.groups import Topology
from gptpar.topology.layout import Layout
from tests.any_module.rank_pool import RankPool

VOCABULARY, LENGTH, WIDTH, INNER, MICRO_BATCHES, STEPS = 12, 5, 6, 9, 4, 20
ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
CLIP = 0.5

Named = dict[str, torch.Tensor]


class Scaled(nn.Module):
    """A trained parameter, a frozen one, and a buffer."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.shift = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("level", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift * self.level


def back(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The embedding the other way round."""
    return F.linear(x, layer.weight)  # type: ignore[arg-type]


def layers() -> list[Any]:
    """One layer at both ends, one twice in the middle, functions between."""
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(nn.Linear, WIDTH, INNER),
        torch.tanh,
        TiedLayerSpec("middle", nn.Linear, INNER, INNER),
        lambda x: 1.5 * x,
        LayerSpec(Scaled, INNER),
        TiedLayerSpec("middle", nn.Linear, INNER, INNER),
        LayerSpec(nn.LayerNorm, INNER),
        LayerSpec(nn.Linear, INNER, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=back),
    ]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batch(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), int64 [2, LENGTH]."""
    generator = torch.Generator().manual_seed(100 * step + place)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Divided:
    """How the layers are divided and trained.

    Attributes:
        keys: more of the configuration.
    """

    world: int = 1
    stages: int = 1
    zero: int = 0
    ratio: float = 0.0
    virtual: int = 1
    keys: dict[str, Any] = field(default_factory=dict, hash=False)
    pipeline: dict[str, Any] = field(default_factory=dict, hash=False)
    offload_param: bool = False

    def __str__(self) -> str:
        words = [f"dp{self.world // self.stages} x pp{self.stages}", f"ZeRO-{self.zero}", f"CPU {self.ratio:g}"]
        words += [f"{self.virtual} virtual"] if self.virtual > 1 else []
        words += [f"{key} {value}" for key, value in self.pipeline.items()]
        return ", ".join([*words, *["parameters on the host"] * self.offload_param])

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero}
        if self.ratio:
            zero["offload_optimizer"] = {"device": "cpu", "ratio": self.ratio}
        if self.offload_param:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES * self.stages // self.world,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero,
            "pipeline": {"stages": self.stages, **self.pipeline},
            "gptpar": {"virtual_stages": self.virtual},
            **self.keys,
        }


@dataclass
class Trace:
    """What some steps gave, a list entry for each."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    weights: list[Named] = field(default_factory=list)


def built() -> tuple[list[Any], Named]:
    """The calls of one process, in order, and its parameters by global name."""
    pipeline = PipelineModule(layers(), topology=Topology(Layout(), 0, torch.device("cpu")))
    (stage,) = pipeline.stages_here
    made = stage.layers_by_name()
    calls = []
    for spec in pipeline.specs:
        fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        calls.append(made[spec.name] if fn is None else functools.partial(fn, made[spec.name]))
    return calls, stage.global_parameters()


@functools.cache
def reference() -> Trace:
    """A plain loop over the layers."""
    with fp64():
        calls, parameters = built()
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **{**ADAM, "betas": tuple(ADAM["betas"])})  # type: ignore[arg-type]
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for place in range(MICRO_BATCHES):
            x, labels = micro_batch(step, place)
            for call in calls:
                x = call(x)
            losses.append(loss_of(x, labels) / MICRO_BATCHES)
            losses[-1].backward()
        trace.losses.append(sum(loss.item() for loss in losses))
        trace.gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        trace.norms.append(nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        optimizer.step()
        trace.weights.append({name: p.detach().clone() for name, p in trained.items()})
    return trace


class fp64:
    """fp64 is the default dtype."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def data_of(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This data-parallel process's micro-batches."""
    mine, dp = engine.topology.data_rank, engine.topology.layout.data
    return (micro_batch(step, place) for step in itertools.count() for place in range(mine, MICRO_BATCHES, dp))


def parameters_here(engine: Any) -> Named:
    """By global name."""
    with engine.gathered():
        stages = engine.module.stages_here
        return {name: p.detach().clone() for stage in stages for name, p in stage.global_parameters().items()}


def train(rank: int, divided: Divided) -> tuple[Trace, float, Named]:
    """20 steps, the mean loss of an evaluation of step 0's data, and this process's parameters at the end."""
    with fp64():
        engine, optimizer, _, _ = gptpar.initialize(model=layers(), loss_fn=loss_of, config=divided.config())
        trace, names = Trace(), list(reference().weights[0])

        def look(*_: object) -> None:
            trace.gradients.append({name: engine.full_gradient(name) for name in names})

        optimizer.register_step_pre_hook(look)
        data = data_of(engine)
        evaluated = engine.eval_batch(data_of(engine)).item()
        for _ in range(STEPS):
            trace.losses.append(engine.train_batch(data).item())
            trace.norms.append(engine.get_global_grad_norm())
            trace.weights.append({name: engine.weights.whole(name, "weights") for name in names})
        mine = parameters_here(engine)
        engine.close()
    return trace, evaluated, mine


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        yield {1: one, 2: two, 4: four}


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


# --- other models ---------------------------------------------------------------------------------------------------


def square(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((y - labels) ** 2).mean()


def vectors(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return (tuple(torch.randn(2, 3, WIDTH, generator=generator).to(dtype)) for _ in itertools.count())  # type: ignore[misc]


def small_config(stages: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "pipeline": {"stages": stages, "partition": "uniform"},
        **keys,
    }


def narrow(rank: int, stages: int, keys: dict[str, Any], specs: list[Any]) -> tuple[list[float], Named]:
    engine, _, _, _ = gptpar.initialize(model=specs, loss_fn=square, config=small_config(stages, **keys))
    data = vectors(torch.float32)
    losses = [engine.train_batch(data).item() for _ in range(4)]
    found = parameters_here(engine)
    engine.close()
    return losses, found


def chain(*, dtypes: tuple[torch.dtype | None, ...] = (None, None)) -> list[Any]:
    return [
        LayerSpec(nn.Linear, WIDTH, INNER, dtype=dtypes[0]),
        LayerSpec(nn.LayerNorm, INNER, dtype=dtypes[0]),
        LayerSpec(As, dtypes[1]),
        LayerSpec(nn.Linear, INNER, WIDTH, dtype=dtypes[1]),
    ]


class As(nn.Module):
    """Casts, if there is a dtype."""

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else x.to(self.dtype)


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


# --- what is refused ------------------------------------------------------------------------------------------------


def initialize(model: Any, config: dict[str, Any] | None = None, **more: Any) -> Any:
    return gptpar.initialize(model=model, config=config or small_config(1), **{"loss_fn": square, **more})[0]


def test_only_whole_steps() -> None:
    engine = initialize(chain())
    for verb in (lambda: engine(torch.ones(3, WIDTH)), lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(GptparError, match=r"^a pipeline takes whole steps: call engine.train_batch\(data_iter\)"):
            verb()
    with pytest.raises(GptparError, match="full_gradient.. is there between"):
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
    model = [linear, torch.tanh, head, lambda x: F.linear(x, linear.weight), functools.partial(back, linear)]
    with pytest.raises(ModelError) as caught:
        initialize(model)
    shared, captured, partial = caught.value.problems
    assert shared == (
        "layers.0 and layers.2 share the parameter weight: write both as TiedLayerSpec(key, ...), so that stages which "
        "both have it sum its gradients."
    )
    assert captured == (
        "layers.3 is a function that uses the parameters of a Linear, which it is not given by the engine: write "
        "TiedLayerSpec(key, ..., forward_fn=function) here and where the layer is, or make it a layer of its own."
    )
    assert partial.startswith("layers.4 is a function that uses the parameters of a Linear")


def test_configurations_that_do_not_fit_the_layers() -> None:
    def problems(model: Any, config: dict[str, Any], **more: Any) -> list[str]:
        with pytest.raises((ConfigError, ModelError)) as caught:
            initialize(model, config, **more)
        return caught.value.problems

    pipeline = PipelineModule(chain(), 1, loss_fn=square)
    assert problems(chain(), small_config(3)) == [
        "config: pipeline.stages is 3, of which 1 process(es) are no multiple: start a multiple."
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
