"""Oddities of parameters and buffers: who shares them, who reads them, what they look like."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.any_module.case import VOCABULARY, WIDTH, Batch, Case, Model, images, next_token, tokens
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
    """Two blocks have one matrix in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class SharedModule(Mlp):
    """One block is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.first(x))
        return self.last(self.blocks[1](self.blocks[2](self.blocks[0](x))))


class SharedUnderTwoNames(Mlp):
    """One block is in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class UsesTwice(nn.Module):
    """One matrix, two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)


class ParameterUsedTwice(Mlp):
    """In each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UsesTwice() for _ in range(3))


class UsedTwiceRecomputed(ParameterUsedTwice):
    """Each recomputation accumulates its gradient by itself: the parameter's hook fires twice in a pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class ParameterUnused(Mlp):
    """Never: a parameter of the root, one in a block, a whole block."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(5))
        self.blocks[1].spare = nn.Linear(3, 3)
        self.blocks.append(Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x)


class BlocksByStep(Mlp):
    """The caller says which blocks run, and in which order."""

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return self.last(x)


def in_changing_order(model: Model, batch: Batch) -> torch.Tensor:
    """The same order on all ranks, another one in each step."""
    order = [[0, 1, 2], [2, 0, 1], [1, 0, 2], [2, 1, 0]][batch["step"] % 4]
    return F.mse_loss(model(batch["x"], order), batch["y"])


def unused_in_some_steps(model: Model, batch: Batch) -> torch.Tensor:
    """A block rests now and then, once before it was ever used."""
    order = [[0, 1], [0, 1, 2], [2], [0, 2]][batch["step"] % 4]
    return F.mse_loss(model(batch["x"], order), batch["y"])


def unused_in_some_micro_batches(model: Model, batch: Batch) -> torch.Tensor:
    """A block rests in one of the micro-batches of a step."""
    order = [[0, 1, 2], [0, 2], [1, 2]][(batch["step"] + batch["micro"]) % 3]
    return F.mse_loss(model(batch["x"], order), batch["y"])


def frozen_parameters() -> nn.Module:
    """Every bias."""
    model = Mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name)
    return model


def frozen_block() -> nn.Module:
    """In the middle: gradients pass through it."""
    model = Mlp()
    model.blocks[1].requires_grad_(False)
    return model


def frozen_beginning() -> nn.Module:
    """The first layers: no gradient reaches them."""
    model = Mlp()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
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


class ReadOutside(nn.Module):
    """The root multiplies by the embedding's matrix itself; the embedding is a unit that need not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.wte.weight)


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


class ScalarAndEmpty(Mlp):
    """A learned factor without dimensions, and a parameter without elements, at the root and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.blocks[1].empty = nn.Parameter(torch.empty(0))
        self.blocks[1].register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.empty.sum() + self.blocks[1].empty.sum()


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


class Transposed(Mlp):
    """A parameter whose elements do not lie in the order of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.blocks[0].up.weight.t().is_contiguous(), "the user's strides are lost"
        return super().forward(x)


def weight_norm() -> nn.Module:
    """Torch's parametrization: a matrix that is computed from two parameters when it is read."""
    model = Mlp()
    for block in model.blocks:
        parametrizations.weight_norm(block.up)
    return model


class Recurrent(nn.Module):
    """An LSTM keeps a list of its parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Conv2d(c, 6, 3, padding=1) for c in (3, 6, 6)))
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert block.weight.is_contiguous(memory_format=torch.channels_last), "the user's strides are lost"
            x = torch.tanh(block(x))
        return self.head(x.mean((2, 3)))


def channels_last() -> nn.Module:
    """Convolutions with other strides."""
    return ConvNet().to(memory_format=torch.channels_last)


def classes(model: Model, batch: Batch) -> torch.Tensor:
    """Cross entropy of images in channels_last."""
    return F.cross_entropy(model(batch["x"].contiguous(memory_format=torch.channels_last)), batch["y"])


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
    Case("shared_module_called_twice", SharedModule),
    Case("shared_module_under_two_names", SharedUnderTwoNames),
    Case("parameter_used_twice", ParameterUsedTwice),
    Case("parameter_used_twice_recomputed", lambda: UsedTwiceRecomputed(False)),
    Case("parameter_used_twice_recomputed_reentrant", lambda: UsedTwiceRecomputed(True)),
    Case("parameter_unused", ParameterUnused),
    Case("block_unused_in_some_steps", BlocksByStep, loss=unused_in_some_steps),
    Case("block_unused_in_some_micro_batches", BlocksByStep, loss=unused_in_some_micro_batches),
    Case("changing_order", BlocksByStep, loss=in_changing_order),
    Case("frozen_parameters", frozen_parameters),
    Case("frozen_block", frozen_block),
    Case("frozen_beginning", frozen_beginning),
    Case("mixed_fp64_fp32", lambda: MixedDtypes(torch.float64, torch.float32), tolerance=NORM_OF_FP32),
    Case("mixed_bf16_fp32", lambda: MixedDtypes(torch.bfloat16, torch.float32), tolerance=SOME_BF16_ROUNDINGS),
    Case("buffers", Buffers),
    Case("parameter_read_outside_its_module", ReadOutside, tokens, next_token),
    Case("multihead_attention", Attention, tokens, next_token),
    Case("scalar_and_empty_parameters", ScalarAndEmpty),
    Case("list_of_parameters", ListOfParameters),
    Case("transposed_parameter", Transposed),
    Case("weight_norm", weight_norm),
    Case("recurrent", Recurrent, tokens, next_token),
    Case("channels_last", channels_last, images, classes),
]
