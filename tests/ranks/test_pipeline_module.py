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
ALONE = Topology(Mesh(), 0, torch.device("cpu"))

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


def step(module: PipelineModule, count: int) -> Result:
    """One step of a global batch; the loss and this process's gradients by global name."""
    mesh = module.topology.mesh
    loss = module.train_batch(batches(count)[module.topology.position(DATA) :: mesh.data])
    found = {name: p for chunk in module.chunks for name, p in chunk.global_parameters().items()}  # type: ignore[operator]
    return loss.item(), {name: p.grad for name, p in found.items() if p.grad is not None}


def stages_agree(stages: int, data: int, options: dict) -> set[str]:
    """The names of the gradients here, which are those of one process."""
    count = MICRO_BATCHES * data
    found_loss, found = step(PipelineModule(layers(), stages, loss_fn=F.mse_loss, **options), count)
    loss, gradients = step(PipelineModule(layers(), topology=ALONE, loss_fn=F.mse_loss), count)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    for name, grad in found.items():
        torch.testing.assert_close(grad, gradients[name], rtol=1e-12, atol=1e-12)
    return set(found)


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


def axis_of(topology: Topology) -> TensorAxis:
    return TensorAxis(topology.mesh.tensor, topology.position("tensor"), topology.group("tensor"))


def split_step(topology: Topology) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """One step of eight micro-batches; where this process's share of each gradient begins, and the share."""
    axis = axis_of(topology)
    pairs = [LayerSpec(ScaledPair, axis), torch.tanh, LayerSpec(ScaledPair, axis, name="second")]
    module = PipelineModule(pairs, topology=topology, loss_fn=F.mse_loss)
    infos = module.chunks[0].infos()  # type: ignore[operator]
    parameters = module.chunks[0].global_parameters()  # type: ignore[operator]
    for name, parameter in parameters.items():
        info, flat = infos[name], parameter.data.view(-1)
        held = parts_of_flat(info.full_shape, info.shape, info.offsets, 0, flat.numel(), flat)
        held.fill(draw(info.init, info.full_shape, 3, name))
    module.train_batch(batches(8)[topology.position(DATA) :: topology.mesh.data])
    return {name: (infos[name].offsets, parameter.grad) for name, parameter in parameters.items()}


def split_layers_agree(topology: Topology) -> None:
    """Each rank's autograd knows its own features alone: the declaration of ``scale`` makes up for it."""
    whole = split_step(ALONE)
    assert whole["layers.0.scale"][1].abs() > 1e-3
    for name, (offsets, grad) in split_step(topology).items():
        box = tuple(slice(o, o + n) for o, n in zip(offsets, grad.shape, strict=True))
        torch.testing.assert_close(grad, whole[name][1][box], rtol=1e-12, atol=1e-14)
    message = "layer 'layers.0': ScaledPair does not declare its parameter 'scale': write self.decl"
    with pytest.raises(TypeError, match=message):
        PipelineModule([LayerSpec(ScaledPair, axis_of(topology), declares=False)], topology=topology)


STAGES: dict[int, list[tuple[int, dict]]] = {  # number of processes -> stages, and how the model is cut
    2: [(2, {"num_virtual_stages": 3, "partition_method": "0,1,2,4,6,8,9"})],
    4: [(4, {}), (2, {"num_virtual_stages": 2, "partition_method": "uniform"})],
}


def every_layout(rank: int, nproc: int) -> list[set[str]]:
    torch.set_default_dtype(torch.float64)
    split_layers_agree(make_topology(Mesh(data=nproc // 2, tensor=2), rank, torch.device("cpu")))
    return [stages_agree(stages, nproc // stages, options) for stages, options in STAGES[nproc]]


@pytest.mark.parametrize("nproc", STAGES)
def test_stages_and_split_layers_agree_with_one_process(nproc: int) -> None:
    """fp64 to 1e-12, whatever the cut; what a split model does not declare is refused at construction."""
    for of_ranks in zip(*spawn(every_layout, nproc, nproc), strict=True):
        assert set().union(*of_ranks) == {
            *("tied.ends.weight", "tied.ends.bias", "layers.2.weight", "layers.2.bias", "middle.weight", "middle.bias"),
            *("layers.5.weight", "layers.5.bias", "layers.7.weight"),
        }
