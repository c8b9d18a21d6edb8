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


class FormBlock(Block):
    """Takes and returns its tensor in another form; see the functions below."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(super().forward, *args, **kwargs)


@dataclass
class Output:
    y: torch.Tensor
    penalty: torch.Tensor | None = None
    name: str = "output"


class Pair(NamedTuple):
    x: torch.Tensor
    rest: tuple[Any, ...]


def dictionaries(block: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "x": block(inputs["x"]), "count": inputs["count"] + 1, "none": None}


def nested_tuples(block: Any, x: torch.Tensor) -> Pair:
    """With None in them; of one output no gradient comes back."""
    y = block(x)
    return Pair(y, (None, [y * 2, (torch.sigmoid(y), None)], torch.arange(3)))


def keywords(block: Any, *, x: torch.Tensor, scale: torch.Tensor, none: None) -> torch.Tensor:
    return block(x) * scale


def views(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return block(x).chunk(2, dim=-1)


def its_input(block: Any, x: torch.Tensor) -> torch.Tensor:
    """The very tensor that it was given."""
    return x


def dataclass_of(block: Any, x: torch.Tensor) -> Output:
    """Not known to pytree: a hook that looks for tensors by itself finds none."""
    y = block(x)
    return Output(y, y.square().mean())


class InOtherForms(MlpOf):
    """A block of each form but dataclasses, and a skip connection; the model is called by keywords alone."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        forms = (dictionaries, dictionaries, nested_tuples, keywords, its_input, views)
        self.blocks = nn.ModuleList(FormBlock(form) for form in forms)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, *, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        out = self.blocks[1](self.blocks[0]({"x": self.first(x), "count": 0}))
        x, (none, (_, (gate, _)), count) = self.blocks[2](out["x"])
        assert none is None and count.dtype == torch.int64
        x = self.blocks[3](x=x * gate, scale=self.scale, none=None)
        one, other = self.blocks[5](self.blocks[4](x))
        x = out["x"] + torch.cat([other, one.tanh()], dim=-1)
        return {"y": self.last(x), "blocks": [out["count"], out["none"]]}


def in_other_forms(model: Model, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(x=batch["x"])["y"], batch["y"])


class Dataclasses(MlpOf):
    def __init__(self) -> None:
        super().__init__(partial(FormBlock, dataclass_of))

    def forward(self, x: torch.Tensor) -> Output:
        x, penalty = self.first(x), torch.zeros(())
        for block in self.blocks:
            out = block(x)
            x, penalty = out.y, penalty + out.penalty
        return Output(self.last(x), penalty)


def of_dataclass(model: Model, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    return F.mse_loss(out.y, batch["y"]) + 0.1 * out.penalty


class SideBlock(Block):
    """Leaves a tensor on itself for the loss; its output may need no gradient of its own."""

    side: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.side = self.down.weight.square().mean() + y.mean()
        return y


class SideOutputs(MlpOf):
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
    """``inside``: recomputes its inside by itself."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return super().forward(x)


class Recomputed(MlpOf):
    """A block that recomputes itself, one called under checkpoint, two under one, and recomputation within another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(RecomputingBlock(number in (0, 4), reentrant) for number in range(5))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        for part in (self.blocks[1], self._two_blocks, self.blocks[4]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.last(x)

    def _two_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](x))))


class PartsWithoutGradient(MlpOf):
    """One block's output is detached; one runs under no_grad, and again with a gradient; another one always without."""

    def __init__(self) -> None:
        super().__init__(blocks=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x)).detach()
        with torch.no_grad():
            target = self.blocks[2](self.blocks[1](x))
        return self.last(self.blocks[3](self.blocks[1](x)) * torch.sigmoid(target))


class InputsWithGradient(MlpOf):
    """The model takes a gradient of its own, with respect to an input, within its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](probe).sum(), probe)
        return super().forward(x) + slope.detach()


class CalledInOtherWays(MlpOf):
    """Blocks with blocks inside; one runs by ``forward``, without hooks, and of another one the parts are called."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Block(), nn.Sequential(Block(), Block())), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1].forward(self.blocks[0](self.first(x)))
        one, two = self.blocks[2].children()
        return self.last(self.blocks[3](x + two(one(x).relu())))


FLOW = [
    Case("blocks_in_other_forms", InOtherForms, loss=in_other_forms),
    Case("dataclasses", Dataclasses, loss=of_dataclass),
    Case("side_outputs", SideOutputs, loss=with_sides),
    Case("in_place_edits", InPlaceEdits),
    Case("recomputed", partial(Recomputed, False)),
    Case("recomputed_reentrant", partial(Recomputed, True)),
    Case("parts_without_gradient", PartsWithoutGradient),
    Case("gradient_of_an_input_within_forward", InputsWithGradient),
    Case("blocks_called_in_other_ways", CalledInOtherWays),
]
