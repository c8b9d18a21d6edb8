"""Lists of layers, their data, and what they are trained to by a plain loop and by an engine."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar import LayerSpec, PipelineModule, TiedLayerSpec
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA, Mesh
from tests.any_module.case import engine_config, fp64, make_optimizer
from tests.any_module.reference import Named, Trace

VOCABULARY, LENGTH, WIDTH, INNER, MICRO_BATCHES, STEPS = 12, 5, 6, 9, 4, 5
CLIP = 0.5


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
    """How the layers are divided and trained."""

    world: int = 1
    stages: int = 1
    zero: int = 0
    ratio: float = 0.0
    virtual: int = 1
    pipeline: dict[str, Any] = field(default_factory=dict, hash=False)
    offload_param: bool = False

    def __str__(self) -> str:
        words = [f"dp{self.world // self.stages} x pp{self.stages}", f"ZeRO-{self.zero}", f"CPU {self.ratio:g}"]
        words += [f"{self.virtual} virtual"] if self.virtual > 1 else []
        words += [f"{key} {value}" for key, value in self.pipeline.items()]
        return ", ".join([*words, *["parameters on the host"] * self.offload_param])

    def config(self) -> dict[str, Any]:
        config = engine_config(
            self.zero,
            self.ratio,
            MICRO_BATCHES * self.stages // self.world,
            gradient_clipping=CLIP,
            pipeline={"stages": self.stages, **self.pipeline},
            gptpar={"virtual_stages": self.virtual},
        )
        if self.offload_param:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        return config


def built() -> tuple[list[Any], Named]:
    """The calls of one process, in order, and its parameters by global name."""
    pipeline = PipelineModule(layers(), topology=Topology(Mesh(), 0, torch.device("cpu")))
    (stage,) = pipeline.stages_here
    made = stage.layers_by_name()
    calls = []
    for spec in pipeline.specs:
        fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        calls.append(made[spec.name] if fn is None else functools.partial(fn, made[spec.name]))
    return calls, stage.global_parameters()


@functools.cache
def reference(build: Callable[[], tuple[list[Any], Named]] = built) -> Trace:
    """A plain loop over the layers."""
    with fp64():
        calls, parameters = build()
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    optimizer = make_optimizer(trained.values())
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


def initialize(divided: Divided, model: list[Any] | None = None) -> Any:
    """An engine for :func:`layers`, or for others."""
    return gptpar.initialize(model=model or layers(), loss_fn=loss_of, config=divided.config())[0]


def data_of(engine: Any, first_step: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This data-parallel process's micro-batches."""
    mine, dp = engine.topology.position(DATA), engine.topology.mesh.data
    steps = itertools.count(first_step)
    return (micro_batch(step, place) for step in steps for place in range(mine, MICRO_BATCHES, dp))


def take_steps(engine: Any, trace: Trace, count: int, names: Sequence[str] = ()) -> None:
    """Train with the data of the steps after those of the trace, and note losses, norms and these parameters."""
    data = data_of(engine, len(trace.losses))
    for _ in range(count):
        trace.losses.append(engine.train_batch(data).item())
        trace.norms.append(engine.get_global_grad_norm())
        trace.weights.append({name: engine.weights.whole(name, "weights") for name in names})


def parameters_here(engine: Any) -> Named:
    """By global name."""
    with engine.gathered():
        stages = engine.module.stages_here
        return {name: p.detach().clone() for stage in stages for name, p in stage.global_parameters().items()}


def train(rank: int, divided: Divided) -> tuple[Trace, float, Named]:
    """Some steps, the mean loss of an evaluation of step 0's data, and this process's parameters at the end."""
    with fp64():
        engine, trace, names = initialize(divided), Trace(), list(reference().weights[0])

        def look(*_: object) -> None:
            trace.gradients.append({name: engine.full_gradient(name) for name in names})

        engine.optimizer.register_step_pre_hook(look)
        evaluated = engine.eval_batch(data_of(engine)).item()
        take_steps(engine, trace, STEPS, names)
        mine = parameters_here(engine)
        engine.close()
    return trace, evaluated, mine


def chained(rank: int, each: Sequence[Divided], folder: str) -> Trace:
    """The same number of the steps in each way; each goes on from the checkpoint of the one before."""
    trace = Trace()
    for divided in each:
        with fp64():
            engine = initialize(divided)
            if trace.losses:
                engine.load_checkpoint(folder)
            take_steps(engine, trace, STEPS // len(each), list(reference().weights[0]))
            engine.save_checkpoint(folder)
            engine.close()
    return trace


class Counting(Scaled):
    """Counts its calls in a buffer, and in its extra state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.level.add_(1.0)
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def counting_layers() -> list[Any]:
    """:func:`layers`, in which the layer in the middle counts."""
    return [
        spec if spec.__class__ is not LayerSpec or spec.cls is not Scaled else LayerSpec(Counting, INNER)
        for spec in layers()
    ]


def counts_of(engine: Any) -> list[tuple[int, float]]:
    """(calls, level) of the layers that count, on this process."""
    return [(one.calls, one.level.mean().item()) for one in engine.module.modules() if isinstance(one, Counting)]


def counted(rank: int, before: Divided, after: Divided, folder: str) -> list[tuple[int, float]]:
    """:func:`counts_of` after a step in one way and a load in another."""
    engine = initialize(before, counting_layers())
    engine.train_batch(data_of(engine))
    engine.save_checkpoint(folder)
    engine.close()
    engine = initialize(after, counting_layers())
    engine.load_checkpoint(folder)
    found = counts_of(engine)
    engine.close()
    return found


def gone_on(rank: int, divided: Divided, folder: str, done: int) -> tuple[Named, list[tuple[int, float]], list[float]]:
    """Load a checkpoint of ``done`` steps: its weights and moments (``KIND/NAME``), its counts, the next 3 losses."""
    with fp64():
        engine = initialize(divided, counting_layers())
        engine.load_checkpoint(folder)
        kinds = ("weights", "exp_avg", "exp_avg_sq")
        names = reference().weights[0]
        held = {f"{kind}/{name}": engine.weights.whole(name, kind).clone() for kind in kinds for name in names}
        counts, data = counts_of(engine), data_of(engine, done)
        losses = [engine.train_batch(data).item() for _ in range(3)]
        engine.close()
    return held, counts, losses


def square(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((y - labels) ** 2).mean()


def vectors(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return (tuple(torch.randn(2, 3, WIDTH, generator=generator).to(dtype)) for _ in itertools.count())  # type: ignore[misc]


def small_config(stages: int, **keys: Any) -> dict[str, Any]:
    uniform = {"stages": stages, "partition": "uniform"}
    return engine_config(accumulation=2, **{"train_micro_batch_size_per_gpu": 3, "pipeline": uniform, **keys})


class As(nn.Module):
    """Casts, if there is a dtype."""

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else x.to(self.dtype)


def chain(*, dtypes: tuple[torch.dtype | None, ...] = (None, None)) -> list[Any]:
    return [
        LayerSpec(nn.Linear, WIDTH, INNER, dtype=dtypes[0]),
        LayerSpec(nn.LayerNorm, INNER, dtype=dtypes[0]),
        LayerSpec(As, dtypes[1]),
        LayerSpec(nn.Linear, INNER, WIDTH, dtype=dtypes[1]),
    ]
