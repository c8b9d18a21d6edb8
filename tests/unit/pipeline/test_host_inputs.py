"""Inputs in host memory: the order in which they leave and return, and the buffers that are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline import host_inputs
from gptpar.pipeline.host_inputs import HostInput, HostInputs
from gptpar.pipeline.recompute import Keep, recomputed
from gptpar.pipeline.runtime import Runtime
from gptpar.pipeline.schedules import Backward, Forward
from gptpar.pipeline.stage import Stage
from tests.unit.pipeline.recomputed import gradients, layer


class OnCpu(HostInputs):
    """Takes tensors of the CPU for those of a device, and records the copies that return."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[float] = []

    def concerns(self, x: torch.Tensor) -> bool:
        return True

    def _bring(self, kept: HostInput) -> None:
        super()._bring(kept)
        self.returned += kept.host.flatten()[:1].tolist()


@pytest.fixture(autouse=True)
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buffers that are made; their memory is not locked."""
    sizes: list[int] = []

    def buffer(num_bytes: int) -> SimpleNamespace:
        sizes.append(num_bytes)
        return SimpleNamespace(data=torch.zeros(num_bytes, dtype=torch.uint8))

    monkeypatch.setattr(host_inputs, "PinnedMemory", buffer)
    return sizes


def tensors(number: int, *shape: int) -> list[torch.Tensor]:
    return [torch.full(shape, float(n)) for n in range(number)]


def test_each_returns_while_the_one_after_it_is_used() -> None:
    host = OnCpu()
    host.begin_pass()
    kept = [host.put(x) for x in tensors(4, 2, 3)]
    assert [one.on_device is not None for one in kept] == [False, False, False, True]  # one leaves at a time
    for number, coming in ((3, [2.0]), (2, [2.0, 1.0]), (1, [2.0, 1.0, 0.0]), (0, [2.0, 1.0, 0.0])):
        x = host.take(kept[number])
        assert torch.equal(x, torch.full((2, 3), float(number))) and host.returned == coming
        assert kept[number].on_device is None


def test_a_pass_brings_nothing_of_another_one() -> None:
    """1F1B: two forward passes, then the backward pass of the first."""
    host, kept = OnCpu(), []
    for x in tensors(2, 4, 2):
        host.begin_pass()
        kept.append([host.put(x), host.put(x + 10)])
    assert float(host.take(kept[0][1])[0, 0]) == 10 and host.returned == [10.0, 0.0]
    assert float(host.take(kept[0][0])[0, 0]) == 0 and host.returned == [10.0, 0.0]
    assert float(host.take(kept[1][1])[0, 0]) == 11 and host.returned == [10.0, 0.0, 1.0]


def test_a_tensor_can_be_taken_twice() -> None:
    host = OnCpu()
    kept = [host.put(x) for x in tensors(3, 5)]
    for _ in range(2):
        assert [float(host.take(one)[0]) for one in reversed(kept)] == [2.0, 1.0, 0.0]


def test_a_dropped_graph_gives_its_buffers_back(allocated: list[int]) -> None:
    host = OnCpu()
    for _ in range(3):
        kept = [host.put(x) for x in tensors(3, 6)]
        host.take(kept[2])  # the second begins to return, and is not taken
        del kept
    assert allocated == [24] * 3


def test_buffers_are_kept(allocated: list[int]) -> None:
    host = OnCpu()
    for _ in range(3):
        gradients(layer(), Keep(host=host))
    assert allocated == [5 * 8 * 8] * 2


def test_sizes_that_grow_need_few_buffers(allocated: list[int]) -> None:
    host = OnCpu()
    for length in range(1, 65):
        host.take(host.put(torch.ones(length, dtype=torch.uint8)))
    assert allocated == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (4, 5), (2, 0), (2, 3, 4)])
def test_values_and_shapes_return(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    host, x = OnCpu(), torch.randn(shape, dtype=dtype)
    first, _ = host.put(x), host.put(x + 1)
    assert torch.equal(host.take(first), x) and first.host.dtype == dtype
    turned = host.put(torch.randn(4, 6, dtype=dtype).t())
    assert turned.host.shape == (6, 4)


def test_gradients_have_the_same_bits() -> None:
    wanted, got = gradients(layer(), None), gradients(layer(), Keep(host=OnCpu()))
    assert [torch.equal(a, b) for a, b in zip(wanted, got, strict=True)] == [True] * 6


def test_inputs_are_on_the_host_between_the_passes() -> None:
    host = OnCpu()
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = recomputed(torch.sin, recomputed(torch.exp, x * 2, keep=Keep(host=host)), keep=Keep(host=host))
    (found,) = torch.autograd.grad(y.sum(), x)
    two = torch.tensor(2.0, dtype=torch.float64)
    assert torch.allclose(found, 2 * two.exp() * two.exp().cos(), rtol=1e-14, atol=0) and host.returned == [2.0]


def test_the_device_does_not_keep_a_later_stage_s_input() -> None:
    """Its host copy is the only one between the passes, and the gradient that goes back is that of plain layers."""
    torch.manual_seed(0)
    specs = [LayerSpec(nn.Linear, 4, 4, dtype=torch.float64, name=name) for name in "ab"]
    keep = Keep(host=OnCpu())
    stage = Stage(specs, build=LayerSpec.build, recompute=[("a",), ("b",)], keep=keep)
    x = torch.randn(3, 4, dtype=torch.float64)
    a, b = stage.layers
    wanted_x = x.clone().requires_grad_()
    wanted = torch.autograd.grad(b(a(wanted_x)).sum(), [wanted_x, *stage.parameters()])
    memory, arrived = StorageWeakRef(x.untyped_storage()), [x]
    how: Any = {"boundary": None, "transport": None, "loss_fn": lambda y, fields: y.sum()}
    runtime = Runtime([stage], 1, 2, micro_batches=[(torch.empty(0), {})], **how)
    runtime._arriving["activation", 0, 0] = cast(Any, SimpleNamespace(take=arrived.pop))
    del x
    runtime.run([Forward(0, 0)])
    assert memory.expired()
    runtime.run([Backward(0, 0)])
    found = [runtime._leaving["gradient", 0, 0], *(parameter.grad for parameter in stage.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
