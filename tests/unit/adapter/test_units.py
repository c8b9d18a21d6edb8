"""Which parameters of a stranger's module lie together, and which modules are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gptpar.adapter.units import MIN_OWN_UNIT, UnitPlan, find_units
from gptpar.errors import ModelError
from tests.unit.adapter.huggingface import tiny_hf


class Block(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


class OtherBlock(Block):
    pass


class Model(nn.Module):
    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def paths(plan: UnitPlan) -> list[str]:
    return [scope.path for scope in plan.scopes]


def groups(plan: UnitPlan) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.parameters for unit in plan.units}


def assert_complete(model: nn.Module, plan: UnitPlan) -> None:
    """Every name once; each unit of one dtype and kind, in the scope that names it."""
    listed = [name for unit in plan.units for name in unit.parameters]
    assert sorted(listed) == sorted(dict(model.named_parameters()))
    assert list(plan.buffers) == list(dict(model.named_buffers()))
    every = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert {plan.aliases.get(name, name) for name in every} == {*listed, *plan.buffers}
    assert all(every[name] is every[first] for name, first in plan.aliases.items())
    for unit in plan.units:
        assert {(every[n].dtype, every[n].requires_grad) for n in unit.parameters} == {(unit.dtype, unit.trainable)}
    assert len(groups(plan)) == len(plan.units)
    assert [(scope.path, name) for scope in plan.scopes for name in scope.units] == sorted(
        ((unit.scope, unit.name) for unit in plan.units), key=lambda one: paths(plan).index(one[0])
    )
    modules = dict(model.named_modules())
    assert all(path in modules for path in paths(plan)) and paths(plan)[0] == ""


def complete_plan(model: nn.Module, *classes: str) -> UnitPlan:
    plan = find_units(model, classes)
    assert_complete(model, plan)
    return plan


def with_experts() -> nn.Module:
    block = OtherBlock()
    block.experts = nn.ModuleList(Block() for _ in range(3))
    return block


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)


def single_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Block(), OtherBlock(), nn.Linear(4, 4))


def parametrized_layers() -> nn.Module:
    return nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)))


def inner_lists() -> nn.Module:
    """A list has no forward before which its parameters could be brought."""
    pairs = nn.ModuleList(nn.ModuleList([Block(), OtherBlock()]) for _ in range(2))
    return Model(pairs=pairs, named=nn.ModuleDict({"left": Block(), "right": Block()}))


def shared_block() -> nn.Module:
    block = Block()
    return Model(head=nn.Linear(4, 4), layers=nn.ModuleList([block, block, block]), again=block)


def block_inside_another() -> nn.Module:
    """By a second path: it belongs to the whole model."""
    blocks = nn.ModuleList([Block(), Block(), Block()])
    blocks[1].helper = blocks[0]
    return Model(blocks=blocks)


def cnn() -> nn.Module:
    """With buffers, of which some have two names."""
    stages = (nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(2))
    shared = nn.BatchNorm2d(3)
    return Model(stages=nn.Sequential(*stages), norm=shared, same=shared)


T5_BLOCKS = [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(3)]
LAYERS = ["layers.0", "layers.1"]
BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "GPT-2": (lambda: tiny_hf("GPT-2"), [f"transformer.h.{i}" for i in range(3)]),
    "Llama": (lambda: tiny_hf("Llama"), [f"model.layers.{i}" for i in range(3)]),
    "T5": (lambda: tiny_hf("T5"), T5_BLOCKS),
    "torch's": (encoder, LAYERS),
    "inner lists": (inner_lists, [*(f"pairs.{i}.{j}" for i in (0, 1) for j in (0, 1)), "named.left", "named.right"]),
    "numbered children": (lambda: Model(**{"0": Block(), "1": Block(), "head": Block()}), ["0", "1"]),
    "blocks with experts": (lambda: Model(layers=nn.Sequential(with_experts(), with_experts())), LAYERS),
    "a shared block": (shared_block, ["layers.0"]),
    "a block inside another": (block_inside_another, ["blocks.1", "blocks.2"]),
    "stages of a CNN": (cnn, ["stages.0", "stages.1"]),
    "single layers and classes": (single_layers, []),
    "parametrized layers": (parametrized_layers, []),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_units(name: str):
    build, blocks = BLOCKS[name]
    model = build()
    plan = complete_plan(model)
    assert paths(plan) == ["", *blocks]
    for path in blocks:
        inside = tuple(n for n, _ in model.named_parameters() if n.startswith(path + "."))
        assert groups(plan)[path] == inside


def test_blocks_are_found_by_class_name():
    model = tiny_hf("T5")
    plan = complete_plan(model, "T5LayerFF", "T5LayerSelfAttention")
    feed_forward = [f"{half}.block.{i}.layer.{j}" for half, j in (("encoder", 1), ("decoder", 2)) for i in range(3)]
    assert sorted(paths(plan)) == sorted(["", *feed_forward, *(f"{block}.layer.0" for block in T5_BLOCKS)])
    assert paths(find_units(model, ["T5LayerFF", "T5Block"])) == ["", *T5_BLOCKS]  # the outermost
    with pytest.raises(ModelError, match="ModuleList have no parameters or no forward"):
        find_units(model, ["ModuleList"])


def test_parameters_shared_by_blocks_belong_to_the_whole_model():
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].second = blocks[0].second
    blocks[1].first.bias = blocks[0].first.bias
    assert groups(complete_plan(Model(blocks=blocks))) == {
        "blocks.0": ("blocks.0.first.weight",),
        "(root)": ("blocks.0.first.bias", "blocks.0.second.weight"),
        "blocks.1": ("blocks.1.first.weight",),
    }


def test_large_parameters_of_the_root_are_units_alone():
    model = Model(
        norm=nn.LayerNorm(4),
        embed=nn.Embedding(MIN_OWN_UNIT // 4, 4, device="meta"),
        almost=nn.Linear(MIN_OWN_UNIT // 4 - 1, 4, device="meta"),
        blocks=nn.ModuleList(Model(linear=nn.Linear(MIN_OWN_UNIT // 4, 4, device="meta")) for _ in range(2)),
    )
    for block in model.blocks:
        block.forward = torch.relu
    plan = complete_plan(model)
    assert [(unit.name, unit.scope, len(unit.parameters)) for unit in plan.units] == [
        ("(root)", "", 4),
        ("embed.weight", "", 1),
        ("blocks.0", "blocks.0", 2),
        ("blocks.1", "blocks.1", 2),
    ]


def test_each_dtype_and_frozen_parameters_have_units_of_their_own():
    block, frozen = Block(), Block()
    block.second.bfloat16()
    block.first.bias.requires_grad_(False)
    frozen.requires_grad_(False)
    model = Model(blocks=nn.ModuleList([block, frozen]))
    plan = complete_plan(model)
    assert groups(plan) == {
        "blocks.0 (float32)": ("blocks.0.first.weight",),
        "blocks.0 (float32, frozen)": ("blocks.0.first.bias",),
        "blocks.0 (bfloat16)": ("blocks.0.second.weight",),
        "blocks.1": ("blocks.1.first.weight", "blocks.1.first.bias", "blocks.1.second.weight"),
    }
    assert [unit.trainable for unit in plan.units] == [True, False, True, False]


def test_no_parameters_none_and_a_child_that_refers_to_its_parent():
    assert find_units(nn.ReLU()) == UnitPlan(find_units(nn.ReLU()).scopes, (), (), {})
    model = Model(blocks=nn.ModuleList(Block() for _ in range(2)), nothing=None)
    model.register_parameter("none", None)
    model.blocks[0].model = model
    model.scalar, model.empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0))
    plan = find_units(model)
    assert paths(plan) == ["", "blocks.0", "blocks.1"]
    assert groups(plan)["(root)"] == ("scalar", "empty")
    memory = torch.zeros(8)
    neighbours = nn.ParameterDict({"left": memory[:4], "right": memory[4:]})  # no views of one another
    assert groups(find_units(neighbours)) == {"(root)": ("left", "right")}


def test_everything_refused_is_told_at_once():
    class DTensor(nn.Parameter):
        pass

    base = nn.Parameter(torch.zeros(6))
    model = Model(lazy=nn.LazyLinear(3), wrapped=nn.DataParallel(nn.Linear(2, 2)))
    model.complex = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model.sparse = nn.Parameter(torch.eye(2).to_sparse())
    model.quantised = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    model.sharded = DTensor(torch.zeros(2))
    model.expanded = nn.Parameter(torch.zeros(1).expand(3))
    model.base, model.view = base, nn.Parameter(base.detach()[2:4])
    model.register_buffer("copy", base.detach()[4:])
    with pytest.raises(ModelError) as error:
        find_units(model, ["Nothing"])
    starts = [problem.split(":")[0] for problem in error.value.problems]
    assert starts == [
        "there is no module of the class Nothing in the model; there are ['DataParallel', 'LazyLinear', 'Linear']",
        "wrapped is wrapped in DataParallel",
        "the parameter complex is complex (torch.complex64)",
        "the parameter sparse is sparse (torch.sparse_coo)",
        "the parameter quantised is quantised or no number to train (torch.int8)",
        "the parameter sharded is a DTensor",
        "the parameter expanded is expanded",
        "lazy.weight has no shape yet",
        "lazy.bias has no shape yet",
        "view lies in the memory of base, but is not the same object",
        "copy lies in the memory of base, but is not the same object",
    ]
