"""What layers declare of their parameters: complete, consistent, and right for every axis."""

from collections.abc import Collection

import pytest
import torch
from torch import nn

from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage
from gptpar.tensor_parallel import TensorAxis
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import COPIES, REST_OF_CONTEXT, REST_OF_DATA
from gptpar.topology.placement import REPLICATED, ParameterInfo, ParameterSpec, Placement, Split, declared_by
from tests.helpers import tiny_config

OVER_TENSOR = frozenset({"tensor"})
COMPLETE = ParameterSpec(Constant(1.0), REPLICATED)


@pytest.mark.parametrize(
    ("declared", "missing"),
    [
        (None, 'write self.declared = {"weight": ParameterSpec(init, placement), ...} in its constructor'),
        (ParameterSpec(placement=REPLICATED), "write init=Normal(std) or init=Constant(value)"),
        (ParameterSpec(Constant(1.0)), "write placement=axis.split(dim, length) where tensor-parallel ranks split it"),
    ],
)
def test_a_layer_that_declares_too_little_is_refused_with_what_to_write(
    declared: ParameterSpec | None, missing: str
) -> None:
    layer = nn.Sequential(nn.Linear(2, 3, bias=False))
    layer[0].declared = {"unused": COMPLETE} if declared is None else {"weight": declared}
    with pytest.raises(TypeError) as caught:
        declared_by(layer, "layers.3")
    assert "layer 'layers.3': Linear does not declare its parameter '0.weight'" in str(caught.value)
    assert missing in str(caught.value)


def test_all_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        declared_by(nn.Linear(2, 3), "head")
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == [
        " Linear does not declare its parameter 'weight'",
        " Linear does not declare its parameter 'bias'",
    ]


@pytest.mark.parametrize(
    ("value", "summed", "told"),
    [
        ({}, {"tensr"}, r"summed over the axes \['tensor'\], not over \['tensr'\]"),
        ({"pipeline": 0}, (), r"split over the axes \['tensor', 'expert'\], not over \['pipeline'\]"),
        ({"tensor": 0}, {"tensor"}, r"the axes \['tensor'\] split the value"),
        ({"tensor": 1, "expert": 1}, (), r"the axes \['expert', 'tensor'\] split the same dimension"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(value: dict[str, int], summed: Collection[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Placement({axis: Split(dim, 8, 0, 4) for axis, dim in value.items()}, frozenset(summed))


def test_two_axes_split_two_dimensions() -> None:
    placement = TensorAxis(2, 1).split(2, 7) | Placement({"expert": Split(0, 4, 2, 2)})
    info = ParameterInfo(torch.Size([2, 5, 4]), Constant(0.0), placement)
    assert (info.full_shape, info.longest_shape, info.offsets) == ((4, 5, 7), (2, 5, 4), (2, 0, 3))
    assert info.placement.copies_over == (REST_OF_CONTEXT, REST_OF_DATA)
    assert TensorAxis(2, 1).split(2, 7).copies_over == REPLICATED.copies_over == COPIES


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gpt_parameters_are_summed_where_ranks_hold_their_own_tokens(size: int, sequence_parallel: bool) -> None:
    """Replicated ones between layers, and no split one."""
    stage = Stage(gpt_model(tiny_config().model, TensorAxis(size=size, sequence_parallel=sequence_parallel)).specs)
    infos = stage.infos()
    split = {name for name, info in infos.items() if info.placement.value}
    inside = {f"layers.{i}.{name}" for i in (0, 1) for name in ("attention.qkv", "mlp.up")}
    outputs = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention.out", "mlp.down")}
    assert split == {"embedding.weight", *(f"{n}.{k}" for n in inside for k in ("weight", "bias")), *outputs}
    summed = {name for name, info in infos.items() if info.placement.gradient_sum}
    assert summed == (infos.keys() - split if size == 2 and sequence_parallel else set())
    assert {info.placement.gradient_sum for info in infos.values()} <= {frozenset(), OVER_TENSOR}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_heads_are_summed_with_and_without_split_tokens(sequence_parallel: bool) -> None:
    """Each rank sees its own heads; what it normalises between layers is its own only where tokens are split."""
    axis = TensorAxis(size=2, sequence_parallel=sequence_parallel)
    infos = Stage(gpt_model(tiny_config("--qk-layernorm --num-layers 1").model, axis).specs).infos()
    heads = {f"layers.0.attention.{n}_norm.{k}" for n in ("query", "key") for k in ("weight", "bias")}
    assert all(not infos[name].placement.value and infos[name].shape == (8,) for name in heads)
    summed = {name for name, info in infos.items() if info.placement.gradient_sum}
    assert (
        summed == {name for name in infos if not infos[name].placement.value} if sequence_parallel else summed == heads
    )
