"""A small GPT in plain PyTorch, as layers that each take and return one tensor: a pipeline can be cut anywhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import gptpar.deepspeed as deepspeed

VOCABULARY = 256  # a byte a token


class Embedding(nn.Module):
    """[samples, length] tokens -> [samples, length, width]."""

    def __init__(self, width: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around it; [samples, length, width] both ways."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
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


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy in nats a byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_specs(num_layers: int, width: int, num_heads: int, length: int) -> list[deepspeed.pipe.LayerSpec]:
    """For a pipeline: each process builds the layers of its own stage alone."""
    LayerSpec = deepspeed.pipe.LayerSpec
    head = [LayerSpec(nn.LayerNorm, width), LayerSpec(nn.Linear, width, VOCABULARY, bias=False)]
    return [LayerSpec(Embedding, width, length), *[LayerSpec(Block, width, num_heads)] * num_layers, *head]


class Gpt(nn.Module):
    """The same layers as one module: [samples, length] tokens -> [samples, length, vocabulary] logits."""

    def __init__(self, specs: list[deepspeed.pipe.LayerSpec], *, recompute: bool):
        super().__init__()
        self.layers, self.recompute = nn.ModuleList(spec.build() for spec in specs), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (
                deepspeed.checkpointing.checkpoint(layer, x)
                if self.recompute and isinstance(layer, Block)
                else layer(x)
            )
        return x
