"""Oddities of parameters and buffers: who shares them, who reads them, what they look like."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.any_module.case import VOCABULARY, WIDTH, Batch, Case, Model, next_token, tokens
from tests.any_module.zoo import Block, Mlp


class TiedWeights(nn.Module):
    """The head's matrix is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedBlocks(Mlp):
    """Two blocks have one matrix in common; another block is in the list twice, so it is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks.append(self.blocks[1])


class UsesTwice(nn.Module):
    """One matrix, two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)


class UsedTwiceRecomputed(Mlp):
    """Each recomputation accumulates its gradient by itself: the parameter's hook fires twice in a pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UsesTwice() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class OddParameters(Mlp):
    """At the root and in blocks: without dimensions, without elements, none, not used, and of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 4))
        self.spare = nn.Parameter(torch.randn(5))
        self.blocks[0].up.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / 4).t())
        self.blocks[1].empty = nn.Parameter(torch.empty(0))
        self.blocks[1].register_parameter("none", None)
        self.blocks[1].spare = nn.Linear(3, 3)
        self.blocks.append(Block())  # is never called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.blocks[0].up.weight.t().is_contiguous(), "the user's strides are lost"
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x) * self.scale + self.empty.sum() + self.blocks[1].empty.sum()


class BlocksByStep(Mlp):
    """The caller says which blocks run, and in which order."""

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return self.last(x)


def in_orders(*orders: list[int], by_micro_batch: bool = False) -> Callable[[Model, Batch], torch.Tensor]:
    """The same order on all ranks, another one in each step, or in each micro-batch, too."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        number = batch["step"] + by_micro_batch * batch["micro"]
        return F.mse_loss(model(batch["x"], orders[number % len(orders)]), batch["y"])

    return loss


def in_two_calls(model: Model, batch: Batch) -> torch.Tensor:
    """One backward pass over both calls' losses: each call leaves out a block, and two blocks are in both."""
    first, second = model(batch["x"], [0, 1, 2]), model(batch["y"], [3, 2, 1])
    return F.mse_loss(first, batch["y"]) + 0.3 * F.mse_loss(second, batch["x"])


def frozen(*parts: str) -> nn.Module:
    """An MLP whose submodules of these names are frozen."""
    model = Mlp()
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    return model


class WiderBlock(Block):
    """Its norm has a dtype of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(F.gelu(self.up(normed)))


class MixedDtypes(Mlp):
    """Matrices of one dtype, norms of another."""

    def __init__(self, matrices: torch.dtype, norms: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(WiderBlock() for _ in range(3))
        self.to(matrices)
        for block in self.blocks:
            block.norm.to(norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.first.weight.dtype)).double()


class CountingBlock(Block):
    """Its buffers change in the forward pass, and count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + 0.1 * self.last * torch.cos(self.calls.double())
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.lerp_(x.mean(0), 0.1)
                self.last.copy_(torch.tanh(self.mean))
        return y


class Buffers(Mlp):
    """Saved ones, such that are not, whole numbers; and one that a block assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(2))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.scale
        self.scale = self.scale * 0.99
        return y


class AttentionBlock(nn.Module):
    """``nn.MultiheadAttention`` reads the parameters of its ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Attention(TiedWeights):
    """Of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))


class ListOfParameters(nn.Module):
    """Containers of parameters have no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.biases = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": torch.ones(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.biases["a"])
        return x * self.biases["b"]


def computed_weights() -> nn.Module:
    """Matrices that are computed from others when they are read, and by older functions before each forward pass."""
    model = Mlp()
    for block in model.blocks:
        parametrizations.weight_norm(block.up)
        nn.utils.spectral_norm(block.down)
    model.last = nn.utils.weight_norm(model.last)
    return model


# The norm of a gradient that one process has from one micro-batch is formed in the parameters' own dtype, and clipping
# passes its rounding on to all weights. Everything else is in fp64 on both sides.
NORM_OF_FP32 = 1e-8

# fp32 masters deviate by roundings of AdamW and of sums over processes, 2e-7 in 20 steps. Where a master lies between
# two numbers of bf16, that moves the weight to its neighbour, 2**-8 away, and then the activations computed with it:
# gradients of the last of 20 steps were seen to deviate by 2e-2, five such roundings.
SOME_BF16_ROUNDINGS = 2**-5

PARAMETERS = [
    Case("tied_weights", TiedWeights, tokens, next_token),
    Case("tied_blocks", TiedBlocks),
    Case("parameter_used_twice_recomputed", partial(UsedTwiceRecomputed, False)),
    Case("parameter_used_twice_recomputed_reentrant", partial(UsedTwiceRecomputed, True)),
    Case("odd_parameters", OddParameters),
    Case("changing_order", BlocksByStep, loss=in_orders([0, 1, 2], [2, 0, 1], [1, 0, 2], [2, 1, 0])),
    # A block rests now and then, once before it was ever used; and in one of the micro-batches of a step.
    Case("block_unused_in_some_steps", BlocksByStep, loss=in_orders([0, 1], [0, 1, 2], [2], [0, 2])),
    Case(
        "block_unused_in_some_micro_batches",
        BlocksByStep,
        loss=in_orders([0, 1, 2], [0, 2], [1, 2], by_micro_batch=True),
    ),
    Case("two_calls_before_one_backward", partial(BlocksByStep, blocks=4), loss=in_two_calls),
    Case("frozen_block", partial(frozen, "blocks.1")),  # gradients pass through it
    Case("frozen_beginning", partial(frozen, "first", "blocks.0")),  # no gradient reaches it
    Case("mixed_fp64_fp32", partial(MixedDtypes, torch.float64, torch.float32), tolerance=NORM_OF_FP32),
    Case("mixed_bf16_fp32", partial(MixedDtypes, torch.bfloat16, torch.float32), tolerance=SOME_BF16_ROUNDINGS),
    Case("buffers", Buffers),
    Case("multihead_attention", Attention, tokens, next_token),
    Case("list_of_parameters", ListOfParameters),
    Case("computed_weights", computed_weights),
]
