"""A small GPT in plain PyTorch: as a module, and as the list of its layers for a pipeline.

Every layer takes and returns one tensor, so that a pipeline can be cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from gptpar import LayerSpec

VOCABULARY = 256  # a byte a token


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    num_layers: int
    width: int
    num_heads: int
    length: int


SIZES = {
    "tiny": Sizes(num_layers=2, width=64, num_heads=4, length=64),
    "small": Sizes(num_layers=12, width=768, num_heads=12, length=512),
    "medium": Sizes(num_layers=24, width=1024, num_heads=16, length=512),
}


class Layer(nn.Module):
    """A layer whose initial values depend on its number alone, so that every mode begins with the same ones."""

    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)


class Embedding(Layer):
    """[samples, length] tokens -> [samples, length, width]."""

    def __init__(self, number: int, sizes: Sizes):
        super().__init__(number)
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(Layer):
    """Attention and MLP, each with a norm before and a residual around it; [samples, length, width] both ways."""

    def __init__(self, number: int, sizes: Sizes):
        super().__init__(number)
        width, self.num_heads = sizes.width, sizes.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Head(Layer):
    """[samples, length, width] -> [samples, length, vocabulary] logits."""

    def __init__(self, number: int, sizes: Sizes):
        super().__init__(number)
        self.norm, self.linear = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy in nats a byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layers(sizes: Sizes) -> list[LayerSpec]:
    """For a pipeline: each process builds the layers of its own stage alone."""
    kinds = [Embedding, *[Block] * sizes.num_layers, Head]
    return [LayerSpec(kind, number, sizes) for number, kind in enumerate(kinds)]


class Gpt(nn.Module):
    """The same layers as one module: (inputs, labels), each [samples, length] -> [] the loss."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.layers = nn.ModuleList(spec.build() for spec in layers(sizes))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = inputs
        for layer in self.layers:
            x = layer(x)
        return loss_fn(x, labels)
