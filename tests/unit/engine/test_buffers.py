"""Buffers of layers that are built without storage: they get memory and their values with the parameters."""

import torch
from torch import nn

from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.engine import Engine, EngineSettings, table_of
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.ranges import Place
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec, build_on_meta
from gptpar.optim.adamw import ADAMW
from gptpar.pipeline.stage import BufferInfo, Stage, memory_for
from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import REPLICATED, ParameterSpec

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """``y = weight * frequencies * x``, and counts its calls."""

    frequencies: torch.Tensor
    calls: torch.Tensor

    def __init__(self, width: int):
        super().__init__()
        self.declared = {"weight": ParameterSpec(Constant(2.0), REPLICATED)}
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("frequencies", torch.empty(width, dtype=torch.float64), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.frequencies.copy_(torch.arange(len(self.frequencies)))
        self.calls.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.weight * self.frequencies.to(x.dtype) * x


class Outer(nn.Sequential):
    """A module whose buffers are inside another one."""

    def __init__(self, width: int):
        super().__init__(Scaled(width))


def make_engine(pipeline: PipelineModule) -> Engine:
    table, axis = table_of(pipeline, Place(), 0.0), DataAxes()
    memory = ParameterMemory(table.units, axis, torch.float32, CPU)
    settings = EngineSettings(torch.float32, torch.float32)
    return Engine(pipeline.stages_here, table, memory, axis, settings, [ADAMW] * 2, 1.0, CPU)


def test_buffers_get_memory_and_values_from_the_engine() -> None:
    layers = [LayerSpec(Scaled, 4, name="first"), LayerSpec(Outer, 4, name="second")]
    pipeline = PipelineModule(layers, num_stages=1, build=build_on_meta)
    engine = make_engine(pipeline)
    assert engine.table.buffers == {
        "first.frequencies": BufferInfo(torch.Size([4]), torch.float64),
        "first.calls": BufferInfo(torch.Size([]), torch.int64),
        "second.0.frequencies": BufferInfo(torch.Size([4]), torch.float64),
        "second.0.calls": BufferInfo(torch.Size([]), torch.int64),
    }
    for parts in engine.optimizer.parts("weights").values():
        parts.fill(torch.full((4,), 2.0))
    engine.publish()
    (stage,) = engine.stages
    y = stage(torch.ones(2, 4), {})
    assert torch.equal(y, torch.tensor([0.0, 4.0, 16.0, 36.0]).expand(2, 4))
    assert not any(value.is_meta for value in stage.buffers())
    assert [int(value) for name, value in stage.named_buffers() if name.endswith("calls")] == [1, 1]
    assert sorted(name for name in stage.state_dict() if "weight" not in name) == [
        "layers.0.calls",
        "layers.1.0.calls",
    ]


def test_buffers_of_a_tied_layer_are_shared_by_its_stages() -> None:
    tied: dict[str, nn.Module] = {}
    stages = [Stage([TiedLayerSpec("one", Scaled, 4, name="shared")], tied=tied) for _ in range(2)]
    weight = torch.ones(4)
    for stage in stages:
        stage.place({"shared.weight": weight} | memory_for(stage.buffer_infos(), CPU))
    for stage in stages:
        stage(torch.ones(4), {})
    assert {int(stage.layers[0].calls) for stage in stages} == {2}
