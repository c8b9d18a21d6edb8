"""Lists of layers, their data, and what they are trained to by a plain loop and by an engine."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar import LayerSpec, PipelineModule, TiedLayerSpec
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA, Mesh

VOCABULARY, LENGTH, WIDTH, INNER, MICRO_BATCHES, STEPS = 12, 5, 6, 9, 4, 5
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
    pipeline = PipelineModule(layers(), topology=Topology(Mesh(), 0, torch.device("cpu")))
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
    mine, dp = engine.topology.position(DATA), engine.topology.mesh.data
    return (micro_batch(step, place) for step in itertools.count() for place in range(mine, MICRO_BATCHES, dp))


def parameters_here(engine: Any) -> Named:
    """By global name."""
    with engine.gathered():
        stages = engine.module.stages_here
        return {name: p.detach().clone() for stage in stages for name, p in stage.global_parameters().items()}


def train(rank: int, divided: Divided) -> tuple[Trace, float, Named]:
    """Some steps, the mean loss of an evaluation of step 0's data, and this process's parameters at the end."""
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


def chained(rank: int, each: Sequence[Divided], folder: str) -> Trace:
    """The same number of the steps in each way; each goes on from the checkpoint of the one before."""
    trace, names = Trace(), list(reference().weights[0])
    for number, divided in enumerate(each):
        with fp64():
            engine, *_ = gptpar.initialize(model=layers(), loss_fn=loss_of, config=divided.config())
            if number:
                engine.load_checkpoint(folder)
            data = itertools.islice(data_of(engine), len(trace.losses) * engine.gradient_accumulation_steps(), None)
            for _ in range(STEPS // len(each)):
                trace.losses.append(engine.train_batch(data).item())
                trace.weights.append({name: engine.weights.whole(name, "weights") for name in names})
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
    for divided, verb in ((before, "save_checkpoint"), (after, "load_checkpoint")):
        engine, *_ = gptpar.initialize(model=counting_layers(), loss_fn=loss_of, config=divided.config())
        if divided is before:
            engine.train_batch(data_of(engine))
        getattr(engine, verb)(folder)
        found = counts_of(engine)
        engine.close()
    return found


def gone_on(rank: int, divided: Divided, folder: str, done: int) -> tuple[Named, list[tuple[int, float]], list[float]]:
    """Load a checkpoint of ``done`` steps: its weights and moments (``KIND/NAME``), its counts, the next 3 losses."""
    with fp64():
        engine, *_ = gptpar.initialize(model=counting_layers(), loss_fn=loss_of, config=divided.config())
        engine.load_checkpoint(folder)
        kinds = ("weights", "exp_avg", "exp_avg_sq")
        names = reference().weights[0]
        held = {f"{kind}/{name}": engine.weights.whole(name, kind).clone() for kind in kinds for name in names}
        counts = counts_of(engine)
        data = itertools.islice(data_of(engine), done * engine.gradient_accumulation_steps(), None)
        losses = [engine.train_batch(data).item() for _ in range(3)]
        engine.close()
    return held, counts, losses


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


class Queries(nn.Module):
    """Learned vectors, whatever it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries


def learned_queries(rank: int, stages: int) -> tuple[list[float], Named]:
    """Losses of three steps, and this process's parameters."""
    with fp64():
        torch.manual_seed(4)
        model = PipelineModule([Queries(), nn.Linear(4, 1)], num_stages=stages, loss_fn=square)
        engine, *_ = gptpar.initialize(model=model, config={**small_config(stages), "pipeline": {}})
        data = itertools.repeat((torch.zeros(3, 4), torch.zeros(3, 1)))
        losses = [engine.train_batch(data).item() for _ in range(3)]
        mine = parameters_here(engine)
        engine.close()
    return losses, mine
