"""Oddities of the forward pass: what goes in and out of blocks, what happens between them, recomputation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.any_module.case import WIDTH, Batch, Case, Model
from tests.any_module.zoo import Block, Mlp


class MlpOf(Mlp):
    """An MLP of other blocks; ``through`` says how a block is called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 3):
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.last(x)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class DictBlock(Block):
    """Dictionary in, dictionary out."""

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**inputs, "x": super().forward(inputs["x"]), "count": inputs["count"] + 1, "none": None}


class Dictionaries(MlpOf):
    def __init__(self) -> None:
        super().__init__(DictBlock)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out: dict[str, Any] = {"x": self.first(x), "count": 0}
        for block in self.blocks:
            out = block(out)
        return {"y": self.last(out["x"]), "blocks": [out["count"], out["none"]]}


@dataclass
class Output:
    y: torch.Tensor
    penalty: torch.Tensor | None = None
    name: str = "output"


class DataclassBlock(Block):
    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        y = super().forward(x)
        return Output(y, y.square().mean())


class Dataclasses(MlpOf):
    """Not known to pytree: a hook that looks for tensors by itself finds none."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def forward(self, x: torch.Tensor) -> Output:
        x, penalty = self.first(x), torch.zeros(())
        for block in self.blocks:
            out = block(x)
            x, penalty = out.y, penalty + out.penalty
        return Output(self.last(x), penalty)


class Pair(NamedTuple):
    x: torch.Tensor
    rest: tuple[Any, ...]


class TupleBlock(Block):
    """Nested tuples with None in them; of one output no gradient comes back."""

    def forward(self, x: torch.Tensor) -> Pair:  # type: ignore[override]
        y = super().forward(x)
        return Pair(y, (None, [y * 2, (torch.sigmoid(y), None)], torch.arange(3)))


class NestedTuples(MlpOf):
    def __init__(self) -> None:
        super().__init__(TupleBlock)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x, (none, (_, (gate, _)), count) = block(x)
        assert none is None and count.dtype == torch.int64
        return x * gate


class KeywordBlock(Block):
    def forward(self, *, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (1 if scale is None else scale)


class Keywords(MlpOf):
    """Blocks and model are called by keywords alone; one value is a tensor that needs a gradient."""

    def __init__(self) -> None:
        super().__init__(KeywordBlock)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x=x, scale=self.scale)


class SideBlock(Block):
    """Leaves a tensor on itself for the loss; its output may need no gradient of its own."""

    side: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.side = self.down.weight.square().mean() + y.mean()
        return y


class SideOutputs(MlpOf):
    def __init__(self) -> None:
        super().__init__(SideBlock)


class SideOutputAlone(MlpOf):
    """What the last block returns is detached: its gradient comes from the side alone."""

    def __init__(self) -> None:
        super().__init__(SideBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number < 2 else block(x).detach()
        return self.last(x)


def with_sides(model: Model, batch: Batch) -> torch.Tensor:
    """The loss takes what the blocks left on themselves."""
    y = model(batch["x"])
    blocks = getattr(model, "module", model).blocks
    return F.mse_loss(y, batch["y"]) + 0.1 * sum(block.side for block in blocks)


class LinearBlock(nn.Linear):
    """Its output is not needed for its gradient, so that it may be edited."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class InPlaceEdits(MlpOf):
    """A block's output is changed in place after it."""

    def __init__(self) -> None:
        super().__init__(LinearBlock)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x).mul_(0.5).relu_()


class RecomputingBlock(Block):
    """Recomputes its inside by itself."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class RecomputesCalls(MlpOf):
    """The root calls its blocks under torch.utils.checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class RecomputesTwoBlocks(RecomputesCalls):
    """One recomputation goes over several blocks and what is between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.both, self.first(x), use_reentrant=self.reentrant))

    def both(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class NestedRecomputation(MlpOf):
    """Recomputation within recomputation."""

    def __init__(self) -> None:
        super().__init__(RecomputingBlock)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class PartWithoutGradient(MlpOf):
    """A block runs under no_grad, and again with a gradient; another one always without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            target = self.blocks[2](self.blocks[0](x))
        return self.last(self.blocks[1](self.blocks[0](x)) * torch.sigmoid(target))


class DetachedMiddle(MlpOf):
    """No gradient reaches what comes before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x)).detach()
        return self.last(self.blocks[2](self.blocks[1](x)))


class Idle(nn.Module):
    """Returns the very tensor it was given; its parameter goes into the loss by another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ReturnsItsInput(MlpOf):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Idle())


class InputsWithGradient(MlpOf):
    """The model takes a gradient of its own, with respect to an input, within its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](probe).sum(), probe)
        return super().forward(x) + slope.detach()


class ManyOutputsBlock(Block):
    """Outputs that are views of one tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward(x).chunk(2, dim=-1)


class Views(MlpOf):
    def __init__(self) -> None:
        super().__init__(ManyOutputsBlock)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one, other = block(x)
        return torch.cat([other, one.tanh()], dim=-1)


class BlocksWithinBlocks(MlpOf):
    """A list of blocks in each block of a list."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Block(), nn.Sequential(Block(), Block())), 2)


class CallsAnotherMethod(MlpOf):
    """Blocks run by a method that is not ``forward``: no hook of theirs is called."""

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block.forward(x)


class UsesPartsOfBlocks(MlpOf):
    """Calls the parts of blocks that are never called themselves."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = block.children()
        return x + second(first(x).relu())


def of_key(model: Model, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"])["y"], batch["y"])


def of_dataclass(model: Model, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    return F.mse_loss(out.y, batch["y"]) + 0.1 * out.penalty


def by_keyword(model: Model, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(x=batch["x"]), batch["y"])


FLOW = [
    Case("dictionaries", Dictionaries, loss=of_key),
    Case("dataclasses", Dataclasses, loss=of_dataclass),
    Case("nested_tuples", NestedTuples),
    Case("keywords", Keywords, loss=by_keyword),
    Case("side_outputs", SideOutputs, loss=with_sides),
    Case("side_output_alone", SideOutputAlone, loss=with_sides),
    Case("in_place_edits", InPlaceEdits),
    Case("recomputation_inside", lambda: MlpOf(RecomputingBlock)),
    Case("recomputation_inside_reentrant", lambda: MlpOf(partial(RecomputingBlock, True))),
    Case("block_called_under_checkpoint", RecomputesCalls),
    Case("block_called_under_checkpoint_reentrant", partial(RecomputesCalls, True)),
    Case("several_blocks_under_checkpoint", RecomputesTwoBlocks),
    Case("several_blocks_under_checkpoint_reentrant", partial(RecomputesTwoBlocks, True)),
    Case("nested_recomputation", NestedRecomputation),
    Case("part_without_gradient", PartWithoutGradient),
    Case("detached_middle", DetachedMiddle),
    Case("block_returns_its_input", ReturnsItsInput),
    Case("gradient_of_an_input_within_forward", InputsWithGradient),
    Case("outputs_are_views", Views),
    Case("blocks_within_blocks", BlocksWithinBlocks),
    Case("forward_called_directly", CallsAnotherMethod),
    Case("parts_of_blocks_are_called", UsesPartsOfBlocks),
]
