"""The public pipeline with a model that is not a GPT: the loss and every gradient of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorAxis
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.initial_values import Constant, draw
from gptpar.topology.mesh import DATA, Mesh
from gptpar.topology.placement import ParameterSpec
from tests.flat_parts import parts_of_flat
from tests.spawn import spawn

MICRO_BATCHES, ROWS, WIDTH = 4, 3, 6

Result = tuple[float, dict[str, torch.Tensor]]


def scale(x: torch.Tensor) -> torch.Tensor:
    """A layer without parameters that a stage may end with."""
    return 1.5 * x


def back(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The shared layer the other way round; its bias has no part in it."""
    return F.linear(x, layer.weight.t())  # type: ignore[operator, union-attr]


def layers() -> list:
    """Different widths at every cut, and the first layer's weight again at the end."""
    return [
        TiedLayerSpec("ends", nn.Linear, WIDTH, 10),
        torch.tanh,
        LayerSpec(nn.Linear, 10, 7),
        torch.tanh,
        LayerSpec(nn.Linear, 7, 9, name="middle"),
        LayerSpec(nn.LayerNorm, 9),
        scale,
        LayerSpec(nn.Linear, 9, 10, bias=False),
        TiedLayerSpec("ends", nn.Linear, WIDTH, 10, forward_fn=back),
    ]


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)) for _ in range(count)]


def step(rank: int, stages: int, data: int, options: dict) -> Result:
    """One step; the loss and this process's gradients by global name."""
    torch.set_default_dtype(torch.float64)
    module = PipelineModule(layers(), stages, loss_fn=F.mse_loss, **options)
    mine = batches(MICRO_BATCHES * data)[module.topology.position(DATA) :: data]
    loss = module.train_batch(mine)
    found = {name: p for chunk in module.chunks for name, p in chunk.global_parameters().items()}  # type: ignore[operator]
    return loss.item(), {name: p.grad for name, p in found.items() if p.grad is not None}


def alone(count: int) -> Result:
    """The same global batch in one process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = PipelineModule(layers(), topology=Topology(Mesh(), 0, torch.device("cpu")), loss_fn=F.mse_loss)
        loss = module.train_batch(batches(count))
        return loss.item(), {n: p.grad for n, p in module.chunks[0].global_parameters().items()}  # type: ignore[operator]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("nproc", "stages", "options"),
    [
        (2, 2, {"num_virtual_stages": 3, "partition_method": "0,1,2,4,6,8,9"}),
        (4, 4, {}),
        (4, 2, {"num_virtual_stages": 2, "partition_method": "uniform"}),
    ],
)
def test_stages_agree_with_one_process(nproc: int, stages: int, options: dict) -> None:
    """fp64 to 1e-12, whatever the cut."""
    loss, gradients = alone(MICRO_BATCHES * nproc // stages)
    seen: set[str] = set()
    for found_loss, found in spawn(step, nproc, stages, nproc // stages, options):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        for name, grad in found.items():
            torch.testing.assert_close(grad, gradients[name], rtol=1e-12, atol=1e-12)
        seen |= found.keys()
    assert (
        seen
        == gradients.keys()
        == {
            *("tied.ends.weight", "tied.ends.bias", "layers.2.weight", "layers.2.bias", "middle.weight", "middle.bias"),
            *("layers.5.weight", "layers.5.bias", "layers.7.weight"),
        }
    )


class ScaledPair(nn.Module):
    """A column layer, a row layer, and between them one number that each rank applies to its own features."""

    def __init__(self, axis: TensorAxis, *, declares: bool = True):
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 8, bias=True, std=0.5, axis=axis)
        self.scale = nn.Parameter(torch.empty(1))
        self.down = RowParallelLinear(8, WIDTH, bias=True, std=0.5, axis=axis)
        if declares:
            self.declared = {"scale": ParameterSpec(Constant(0.7), axis.inside_layers)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.scale * self.up(x)))


def tensor_parallel(rank: int, data: int, tensor: int) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """One step of eight micro-batches; where this process's share of each gradient begins, and the share."""
    torch.set_default_dtype(torch.float64)
    topology = make_topology(Mesh(data=data, tensor=tensor), rank, torch.device("cpu"))
    axis = TensorAxis(tensor, topology.position("tensor"), topology.group("tensor"))
    pairs = [LayerSpec(ScaledPair, axis), torch.tanh, LayerSpec(ScaledPair, axis, name="second")]
    module = PipelineModule(pairs, topology=topology, loss_fn=F.mse_loss)
    infos = module.chunks[0].infos()  # type: ignore[operator]
    parameters = module.chunks[0].global_parameters()  # type: ignore[operator]
    for name, parameter in parameters.items():
        info, flat = infos[name], parameter.data.view(-1)
        held = parts_of_flat(info.full_shape, info.shape, info.offsets, 0, flat.numel(), flat)
        held.fill(draw(info.init, info.full_shape, 3, name))
    module.train_batch(batches(8)[topology.position(DATA) :: data])
    return {name: (infos[name].offsets, parameter.grad) for name, parameter in parameters.items()}


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
def test_a_replicated_weight_inside_a_split_layer_gets_its_whole_gradient(data: int, tensor: int) -> None:
    """Each rank's autograd knows of its own features alone; the declaration makes up for it."""
    (alone,) = spawn(tensor_parallel, 1, 1, 1)
    assert alone["layers.0.scale"][1].abs() > 1e-3
    for found in spawn(tensor_parallel, data * tensor, data, tensor):
        for name, (offsets, grad) in found.items():
            box = tuple(slice(o, o + n) for o, n in zip(offsets, grad.shape, strict=True))
            torch.testing.assert_close(grad, alone[name][1][box], rtol=1e-12, atol=1e-14)


def undeclared(rank: int) -> str:
    topology = make_topology(Mesh(tensor=2), rank, torch.device("cpu"))
    axis = TensorAxis(2, rank, topology.group("tensor"))
    with pytest.raises(TypeError) as caught:
        PipelineModule([LayerSpec(ScaledPair, axis, declares=False)], topology=topology, loss_fn=F.mse_loss)
    return str(caught.value)


def test_what_a_split_model_does_not_declare_is_refused_at_construction() -> None:
    for message in spawn(undeclared, 2):
        assert message.startswith(
            "layer 'layers.0': ScaledPair does not declare its parameter 'scale': write self.decl"
        )
