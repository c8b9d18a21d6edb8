"""A model that is built without memory: its values are made later, whichever are asked for, in whichever order."""

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import gptpar
from tests.unit.adapter.deferred import defer, made, tensors_of
from tests.unit.adapter.huggingface import tiny_hf


def constants(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """What a constructor makes without random numbers: the same under two seeds."""
    torch.manual_seed(1)
    first = tensors_of(build())
    torch.manual_seed(2)
    second = tensors_of(build())
    return {name: tensor for name, tensor in first.items() if torch.equal(tensor, second[name])}


def assert_same_distributions(values: dict[str, torch.Tensor], build: Callable[[], nn.Module]) -> None:
    """Constants in every bit; shapes, dtypes, strides; of all else, mean and deviation within five standard errors."""
    same = constants(build)
    expected = tensors_of(build())
    assert list(values) == list(expected)
    for name, tensor in expected.items():
        value = values[name]
        strides = torch.empty_like(tensor).stride()  # its own where it is dense
        assert (value.dtype, value.shape, value.stride()) == (tensor.dtype, tensor.shape, strides), name
        assert not value.is_meta and not value.requires_grad
        if name in same:
            assert torch.equal(value, tensor), name
        else:
            got, wanted, count = value.double(), tensor.double(), value.numel()
            spread = wanted.std().item() if count > 1 else 1.0
            assert abs(got.mean() - wanted.mean()).item() <= 5 * spread * math.sqrt(2 / count), name
            if count > 50:
                assert abs(got.std() / wanted.std() - 1).item() <= 5 / math.sqrt(count), name


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Llama in bfloat16", pytest.param("T5", marks=pytest.mark.slow)])
def test_transformers_are_built(name: str):
    assert_same_distributions(made(lambda: tiny_hf(name)), lambda: tiny_hf(name))
    assert len(constants(lambda: tiny_hf(name))) > 0


class Oddities(nn.Module):
    """Every way to give a tensor values that a constructor uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(30, 10) * 0.02 + 1)
        self.legacy = nn.Parameter(torch.Tensor(20, 30))
        nn.init.trunc_normal_(self.legacy, std=0.1, a=-0.15, b=0.2)
        self.orthogonal = nn.Parameter(torch.empty(8, 8))
        nn.init.orthogonal_(self.orthogonal)
        self.through_data = nn.Parameter(torch.empty(40, 4))
        self.through_data.data.normal_(3, 0.1)
        self.through_data.data[3:7].zero_()
        self.replaced = nn.Parameter(torch.zeros(7))
        self.replaced.data = torch.ones(5)
        self.numbers = nn.Parameter(torch.from_numpy(np.arange(6.0)).float())
        self.listed = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T)
        self.rates = torch.linspace(0, 0.3, 4).tolist()
        self.indexed = nn.Parameter(torch.arange(12).view(3, 4).float() / 7)
        with torch.no_grad():
            self.indexed[1] = torch.eye(4)[2]
            self.indexed[self.indexed > 1] = -1
            self.indexed.transpose(0, 1)[0].mul_(2)
        self.view = nn.Parameter(self.indexed.detach().clone()[1:, ::2])
        self.layers = nn.ModuleList(copy.deepcopy(nn.Linear(16, 16)) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.cast = nn.Linear(16, 16).bfloat16().to("cpu")
        self.pair = nn.Parameter(torch.cat([torch.rand(50), torch.rand_like(self.scaled[:, 0])]))
        self.permuted = nn.Parameter(torch.randperm(100).double())
        self.last = nn.Parameter(torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last))
        self.register_buffer("mask", torch.ones(5, 5).tril().bool()[None])
        self.register_buffer("table", torch.outer(torch.arange(4), 1 / 10 ** (torch.arange(0, 4, 2) / 4)).cos())
        self.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4.0)))
        if torch.ones(3).sum() > 2.5 and float(torch.tensor(2.0)) == 2 and np.asarray(torch.ones(2))[1] == 1:
            self.register_buffer("answered", torch.tensor(self.rates)[torch.arange(4).nonzero()[:, 0]])


def test_every_way_to_give_values():
    values = made(Oddities)
    assert_same_distributions(values, Oddities)
    assert defer(Oddities)[0].rates == torch.linspace(0, 0.3, 4).tolist()
    same = constants(Oddities)
    deterministic = {"replaced", "numbers", "listed", "indexed", "view", "mask", "table", "rotations", "answered"}
    assert deterministic <= set(same)
    gram = values["orthogonal"] @ values["orthogonal"].T
    assert torch.allclose(gram, torch.eye(8), atol=1e-5)
    assert values["legacy"].min() >= -0.15 and values["legacy"].max() <= 0.2
    assert values["through_data"][3:7].abs().sum() == 0
    assert values["permuted"].sort().values.equal(torch.arange(100).double())


OPERATORS: dict[str, Callable[[], torch.Tensor]] = {
    "singular values": lambda: torch.linalg.svd(torch.arange(16.0).view(4, 4)).S,
    "conjugate": lambda: torch.complex(torch.ones(2), torch.arange(2.0)).conj().imag,
    "integers divided": lambda: torch.arange(9) / 7,
    "unique": lambda: torch.unique(torch.tensor([1.0, 2.0, 1.0])),
    "list of tensors": lambda: torch.tensor([torch.tensor(1.0), *torch.linspace(0, 1, 3)]),
    "foreach": lambda: torch._foreach_mul([torch.ones(2), torch.arange(3.0)], 2.0)[1],
    "out": lambda: torch.eye(3, out=torch.empty(3, 3)),
    "text": lambda: torch.ones(int(f"{torch.tensor(2):d}")),
    "loop": lambda: torch.tensor([1.0 if row.sum() > 2 else 0.0 for row in torch.arange(6).view(3, 2)]),
    "transposed in place": lambda: torch.arange(6).view(2, 3).t_(),
    "resized": lambda: torch.arange(6).resize_(2, 2),
    "channels last": lambda: torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last).cumsum(1),
    "bytes": lambda: torch.ones(2).view(torch.int32),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_same_bits(name: str):
    with gptpar.deferred_init() as recording:
        tensor = OPERATORS[name]()
    value, expected = recording.make(tensor), OPERATORS[name]()
    assert tensor.is_meta and torch.equal(value, expected) and value.dtype == expected.dtype


def test_random_operators_without_a_generator():
    with gptpar.deferred_init() as recording:
        dropped = torch.nn.functional.dropout(torch.ones(1000), 0.25)
        sampled = torch.distributions.Normal(2.0, 0.5).sample((1000,))
        chosen = torch.multinomial(torch.tensor([0.2, 0.0, 0.8]), 1000, replacement=True)
        mean = chosen.double().mean().item()
    zeros = recording.make(dropped).eq(0).double().mean().item()
    assert zeros == pytest.approx(0.25, abs=0.05)
    assert recording.make(sampled).mean().item() == pytest.approx(2, abs=0.1)
    assert mean == recording.make(chosen).double().mean().item() == pytest.approx(1.6, abs=0.1)


def parametrized() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8, bias=False)),
    )


def initialised() -> nn.Module:
    layers = nn.ModuleList(nn.Conv2d(8, 8, 3) for _ in range(5)).append(nn.Linear(20, 20))
    nn.init.dirac_(layers[0].weight, 2)
    nn.init.kaiming_normal_(layers[1].weight, mode="fan_out")
    nn.init.xavier_uniform_(layers[2].weight)
    nn.init.constant_(layers[3].bias, 0.3)
    nn.init.eye_(layers[5].weight)
    nn.init.sparse_(layers[5].weight, 0.4)
    return layers


def lazy() -> nn.Module:
    layer = nn.LazyLinear(8)
    layer(torch.ones(1, 64))
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    "norms": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, True, True), nn.PReLU()),
    "recurrent": lambda: nn.Sequential(nn.LSTM(8, 8, 2, bidirectional=True), nn.GRU(4, 4), nn.RNNCell(4, 4)),
    "embeddings": lambda: nn.Sequential(nn.Embedding(9, 8, padding_idx=2), nn.EmbeddingBag(9, 4)),
    "parametrized": parametrized,
    "initialisers": initialised,
    "lazy": lazy,
}


@pytest.mark.parametrize("name", LAYERS)
def test_torch_layers_are_built(name: str):
    assert_same_distributions(made(LAYERS[name]), LAYERS[name])


def test_parametrized_weights_are_those_of_their_originals():
    """Spectral norm's vectors are of the weight that was drawn: its power iteration had converged."""
    module, recording = defer(parametrized)
    real = parametrized()
    real.load_state_dict({name: recording.make(value) for name, value in module.state_dict().items()})
    assert torch.linalg.matrix_norm(real[1].eval().weight, 2).item() == pytest.approx(1, abs=0.1)
    assert torch.allclose(real[2].weight @ real[2].weight.T, torch.eye(8), atol=1e-5)


def test_values_depend_on_the_seed_alone():
    module, recording = defer(Oddities)
    names = tensors_of(module)
    forwards = {name: recording.make(tensor) for name, tensor in names.items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        backwards = {name: recording.make(names[name]) for name in reversed(names)}
    finally:
        torch.set_default_dtype(torch.float32)
    with ThreadPoolExecutor(4) as pool:
        threads = dict(zip(names, pool.map(recording.make, names.values()), strict=True))
    again, other = made(Oddities), made(Oddities, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # of the process
    for name, value in forwards.items():
        for same in (backwards, threads, again):
            assert torch.equal(value, same[name]) and value.dtype == same[name].dtype, name
    assert not torch.equal(forwards["scaled"], other["scaled"])
    assert not torch.equal(forwards["cast.weight"], other["cast.weight"])


def test_contexts_in_each_other() -> None:
    with gptpar.deferred_init(seed=0) as outer, gptpar.deferred_init(seed=1) as inner:
        tensor, next_one = torch.randn(3), torch.randn(3)
    assert outer.knows(tensor) and inner.knows(tensor)
    assert not torch.equal(outer.make(tensor), inner.make(tensor))
    assert not torch.equal(outer.make(tensor), outer.make(next_one))


def test_a_generator_of_the_constructor_is_not_used():
    def build(seed: int) -> nn.Module:
        layer = nn.Linear(8, 8)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
        layer.bias = nn.Parameter(torch.rand(8, generator=torch.Generator().manual_seed(seed)))
        return layer

    first, second = made(lambda: build(1)), made(lambda: build(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
