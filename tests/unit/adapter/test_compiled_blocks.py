"""Blocks that are compiled by default: shared graphs, and what happens where compilation fails or does not pay."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.adapter.compiled_blocks import CompiledBlocks, compile_shared
from gptpar.adapter.module_stage import ModuleStage
from gptpar.adapter.units import find_units

pytestmark = pytest.mark.slow  # torch's compiler alone takes seconds to import

WIDTH = 4


class Block(nn.Module):
    """Counts its calls in a buffer, first of all, so that nothing may run twice."""

    def __init__(self, factor: int):
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), factor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x)) * self.factor


class Branching(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + 1 if x.sum() > 0 else x - 1


class Failing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the user's own")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def losses(blocks: Sequence[nn.Module], *, recompute: bool = False) -> list[torch.Tensor]:
    """Loss and gradients of three passes."""
    found = []
    for _ in range(3):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x.square().mean().backward()
        found += [x.detach(), *(p.grad.clone() for block in blocks for p in block.parameters())]
    return found


def made(kind: type[Block], factors: Sequence[int]) -> tuple[nn.ModuleList, nn.ModuleList]:
    plain = nn.ModuleList(kind(factor) for factor in factors)
    other = copy.deepcopy(plain)
    return plain, other


def compiled(blocks: nn.ModuleList) -> CompiledBlocks:
    found = CompiledBlocks(len(blocks), torch._dynamo.lookup_backend("eager"))
    for block in blocks:
        block.forward = found.forward_of(block)
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("recompute", [False, True])
def test_equal_blocks_share_a_graph(recompute: bool) -> None:
    plain, blocks = made(Block, [1] * 12)
    found = compiled(blocks)
    here = losses(blocks, recompute=recompute)
    assert found.num_graphs == 1
    assert all(map(torch.equal, here, losses(plain, recompute=recompute)))


@pytest.mark.filterwarnings("error")
def test_engines_made_later_find_the_graphs_of_former_ones() -> None:
    """Torch compiles eight graphs for one class, and then no more: the ninth engine's blocks would run uncompiled."""
    counts = []
    for _ in range(10):
        plain, blocks = made(Block, [1] * 2)
        found = compiled(blocks)
        assert all(map(torch.equal, losses(blocks), losses(plain)))
        counts.append(found.num_graphs)
    assert counts == [1] + [0] * 9


def test_blocks_that_need_a_graph_each_are_compiled_no_further() -> None:
    """And are recomputed as they ran."""
    plain, blocks = made(Block, range(12))
    found = compiled(blocks)
    with pytest.warns(UserWarning, match="12 blocks need more than 2 different graphs.*use_cache = False") as said:
        here = losses(blocks, recompute=True)
    assert len(said) == 1
    assert found.num_graphs == 3, "two were compiled, the third was refused, and no block was tried after it"
    assert all(map(torch.equal, here, losses(plain, recompute=True)))
    assert all(block.calls == 6 for block in blocks)


def test_a_block_that_is_no_single_graph_runs_uncompiled_and_runs_once() -> None:
    plain, blocks = made(Branching, [1] * 3)
    compiled(blocks)
    told = r"cannot compile Branching as one graph: .*test_compiled_blocks\.py:\d+\)"
    with pytest.warns(UserWarning, match=told) as said:
        here = losses(blocks)
    assert len(said) == 1
    assert all(map(torch.equal, here, losses(plain)))
    assert [float(block.calls) for block in blocks] == [3.0] * 3


@pytest.mark.filterwarnings("error")
def test_the_users_own_error_arrives_without_a_warning() -> None:
    _, blocks = made(Failing, [1] * 2)
    compiled(blocks)
    with pytest.raises(KeyError, match="the user's own"):
        losses(blocks)


def compiled_by(model: nn.Module) -> ModuleStage | None:
    """A stage of the model if its blocks are compiled."""
    stage = ModuleStage(model, find_units(model))
    return None if compile_shared(stage, "eager") is None else stage


def test_forwards_are_the_users_again_after_the_engine() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(1), Block(1)))
    stage = compiled_by(model)
    assert stage is not None and "forward" in vars(model[1][0])
    stage.undo.close()
    assert not any("forward" in vars(block) for block in model[1])


def test_a_model_without_blocks_and_blocks_that_the_user_compiled_are_left_alone() -> None:
    assert compiled_by(nn.Linear(2, 2)) is None
    for compile_it in (
        lambda block: block.compile(backend="eager"),
        lambda block: block.linear.compile(backend="eager"),
        lambda block: setattr(block, "forward", torch.compile(block.forward, backend="eager")),
    ):
        model = nn.Sequential(Block(1), Block(1))
        compile_it(model[1])
        assert compiled_by(model) is None
