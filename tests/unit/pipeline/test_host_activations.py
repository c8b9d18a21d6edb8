"""Activations in host memory: which leave, the order in which they leave and return, the buffers that are kept."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gptpar.model.block import Block
from gptpar.pipeline.host_activations import HostActivations, HostBlock, HostTensor, offloaded_blocks
from gptpar.pipeline.recompute import Keep, recomputed
from tests.helpers import tiny_config


class Watched(HostActivations):
    """Records what is copied to the host and back, by size or first element, and which buffers are made."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []
        self.returned: list[float] = []
        self.made: list[int] = []

    def put(self, block: HostBlock, x: torch.Tensor) -> HostTensor:
        before = len(block.copies)
        kept = super().put(block, x)
        self.left += [x.untyped_storage().nbytes()] * (len(block.copies) - before)
        return kept

    def _bring(self, block: HostBlock) -> None:
        missing = [copy for copy in block.alive() if copy.on_device is None]
        super()._bring(block)
        self.returned += [float(copy.host[:4].view(torch.float32)) for copy in missing if len(copy.host) >= 4]

    def _buffer(self, num_bytes: int, device: torch.device) -> Any:
        before = len(self._free)
        buffer = super()._buffer(num_bytes, device)
        self.made += [len(buffer)] * (len(self._free) == before)
        return buffer


def put(host: HostActivations, *values: float, shape: tuple[int, ...] = (2, 3), first: bool = True) -> list[HostTensor]:
    """Tensors that one block puts."""
    with host.block(saves_first=first) as block:
        return [host.put(block, torch.full(shape, value)) for value in values]


def is_there(kept: HostTensor) -> bool:
    return kept.copy.on_device is not None


@pytest.mark.parametrize("first", [True, False])
def test_each_block_returns_while_the_one_after_it_is_used(first: bool) -> None:
    host = Watched()
    host.begin_pass()
    kept = [put(host, value, value + 0.5, first=first) for value in (0.0, 1.0, 2.0, 3.0)]
    there = [[is_there(one) for one in block] for block in kept]
    assert there == [[False] * 2] * 3 + [[True] * 2]  # one block leaves at a time
    coming: list[float] = []
    for number in (3, 2, 1, 0):
        coming += [number - 1, number - 0.5] * (number > 0)
        for place, one in enumerate(kept[number]):
            assert torch.equal(host.take(one), torch.full((2, 3), number + place / 2)) and host.returned == coming
        del one
        kept[number].clear()


@pytest.mark.parametrize("first", [0, 1])
def test_a_pass_brings_nothing_of_another_one(first: int) -> None:
    """1F1B: two forward passes, then the backward pass of the first; of the last, in a schedule of virtual stages."""
    host, kept = Watched(), []
    for value in (0.0, 1.0):
        host.begin_pass()
        kept.append([put(host, value)[0], put(host, value + 10)[0]])
    if first:
        assert [float(host.take(one)[0, 0]) for one in reversed(kept[1])] == [11.0, 1.0] and host.returned == [1.0]
        return
    assert float(host.take(kept[0][1])[0, 0]) == 10 and host.returned == [10.0, 0.0]
    assert float(host.take(kept[0][0])[0, 0]) == 0 and host.returned == [10.0, 0.0]
    assert float(host.take(kept[1][1])[0, 0]) == 11 and host.returned == [10.0, 0.0, 1.0]


def test_a_dropped_graph_gives_its_buffers_and_the_device_s_memory_back() -> None:
    host = Watched()
    for _ in range(3):
        kept = [put(host, value)[0] for value in (0.0, 1.0, 2.0)]
        there = host.take(kept[2])  # the second begins to return, and is not taken
        memory = StorageWeakRef(there.untyped_storage())
        del kept, there
        assert memory.expired()
    assert host.made == [24] * 3


def test_sizes_that_grow_need_few_buffers() -> None:
    host = Watched()
    for length in range(1, 65):
        host.take(put(host, 1.0, shape=(length,))[0])
    assert host.made == [4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (4, 5), (2, 0), (2, 3, 4)])
def test_values_shapes_and_strides_return(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of views, too, which share one copy; a storage that was changed in between is copied again."""
    host, x, wide = Watched(), torch.randn(shape, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    views = [wide.t(), wide[1:4], wide[:, 2:4], wide.view(-1)[::3]]
    with host.block() as block:
        kept = [host.put(block, one) for one in (x, *views)]
        assert len(block.copies) == 2
    wanted = [one.clone() for one in (x, *views)]
    strides = [one.stride() for one in (x, *views)]
    with host.block() as block:
        host.put(block, wide)
        wide += 1
        host.put(block, wide)
        assert len(block.copies) == 2
    assert not any(is_there(one) for one in kept)
    for one, value, stride in zip(kept, wanted, strides, strict=True):
        found = host.take(one)
        assert torch.equal(found, value) and (found.dtype, found.stride()) == (dtype, stride)


def test_inputs_of_recomputed_layers_are_on_the_host_between_the_passes() -> None:
    host = Watched()
    x = torch.ones(4, dtype=torch.float32, requires_grad=True)
    y = recomputed(torch.sin, recomputed(torch.exp, x * 2, keep=Keep(host=host)), keep=Keep(host=host))
    (found,) = torch.autograd.grad(y.sum(), x)
    two = torch.tensor(2.0)
    assert torch.allclose(found, 2 * two.exp() * two.exp().cos(), rtol=1e-6, atol=0) and host.returned == [2.0]


BLOCKS = [
    ("", ""),
    ("layernorm mlp", ""),
    ("layernorm mlp_act", "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"),
    ("core_attn mlp layernorm", "--use-parallel-residual --qk-layernorm --num-query-groups 2"),
]


@pytest.mark.parametrize(("modules", "flags"), BLOCKS)
def test_blocks_compute_the_same_bits(modules: str, flags: str) -> None:
    """Two micro-batches in flight, twice; parameters, buffers and arguments stay, and no storage is copied twice."""
    model, host = tiny_config(f"--num-attention-heads 4 {flags}").model, Watched()
    torch.manual_seed(0)
    blocks = [Block(model, recompute_modules=frozenset(modules.split())).double().train() for _ in range(3)]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    for parameter in parameters:
        nn.init.normal_(parameter, std=0.2)
    positions_BS = torch.arange(model.seq_length).expand(3, -1).contiguous()

    def found(keeps: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        inputs, ends, all_found = [], [], []
        for _ in range(2):
            x = torch.randn(3 * model.seq_length, model.hidden_size, dtype=torch.float64, requires_grad=True)
            host.begin_pass()
            y: Any = x
            for block in blocks:
                args = positions_BS, None, model.seq_length
                y = host.call(block, y, *args) if keeps else block(y, *args)
            inputs.append(x)
            ends.append(y)
        for x, y in zip(inputs, ends, strict=True):
            grads = torch.autograd.grad(y.sin().sum(), [x, *parameters], allow_unused=True)
            all_found += [y.detach(), *(grad for grad in grads if grad is not None)]
        return all_found

    wanted = found(False)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found(True), wanted, strict=True))
    weights = {parameter.nbytes for block in blocks for parameter in block.parameters() if parameter.dim() > 1}
    hidden = 3 * model.seq_length * model.hidden_size * 8
    assert len(host.left) == 2 * len(host.made) and not weights & set(host.left)
    if modules == "layernorm mlp":  # an input and a middle, queries with keys and values, attention's output
        assert {hidden, 3 * hidden} < set(host.left) and max(host.left) == 3 * hidden


def test_a_compiled_block_computes_the_same_bits() -> None:
    host, found = Watched(), []
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).double()
    block.compile(backend="aot_eager")
    x = torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
    for call in (block, lambda x: host.call(block, x)):
        found.append(torch.autograd.grad(call(call(x)).sin().sum(), [x, *block.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert 24 * 64 * 8 in host.left and len(host.left) == len(host.made)


@pytest.mark.parametrize(
    ("total", "count", "leaving"),
    [
        (6, 0, []),
        (6, 6, [0, 1, 2, 3, 4, 5]),
        (6, 4, [0, 1, 3, 4]),
        (6, 1, [0]),
        (5, 2, [0, 2]),
        (1, 1, [0]),
        (0, 0, []),
    ],
)
def test_the_blocks_that_leave_are_evenly_spread(total: int, count: int, leaving: list[int]) -> None:
    names = [f"layers.{number}" for number in range(total)]
    assert offloaded_blocks(names, count) == {names[number] for number in leaving}
