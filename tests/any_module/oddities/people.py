"""Modules as people bring them, each small: adapters, recurrent nets, meta-learning, experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.any_module.case import LENGTH, VOCABULARY, WIDTH, Batch, Case, Model, next_token, tokens
from tests.any_module.zoo import Block, Mlp


class Lora(nn.Module):
    """A frozen layer beside a trained product of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * x @ self.down.t() @ self.up.t()


def lora_adapters() -> nn.Module:
    """Only the adapters are trained."""
    model = Mlp().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return model


class PackedSequences(nn.Module):
    """An LSTM and a GRU over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True, proj_size=8)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([LENGTH, LENGTH - 3])
        packed, _ = self.lstm(pack_padded_sequence(self.embedding(x), lengths, batch_first=True))
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)
        return self.head(self.gru(states)[0])


def gradient_penalty(model: Model, batch: Batch) -> torch.Tensor:
    """The gradient with respect to the input is part of the loss."""
    x = batch["x"].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


class LearnsWithin(nn.Module):
    """Meta-learning: the forward takes a step of its own by functional calls, and the loss leads through it."""

    def __init__(self) -> None:
        super().__init__()
        self.learner = Mlp(blocks=2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(self.learner.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.learner, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)}
        return torch.func.functional_call(self.learner, moved, (x + 1,))


class Experts(nn.Module):
    """Each sample goes to one expert; which experts are called depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


class Reversed(torch.autograd.Function):
    """Computes its inputs from its outputs, and gradients by nested backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, f: nn.Module, g: nn.Module, *weights: Any) -> Any:
        with torch.no_grad():
            x = x + f(y)
            y = y + g(x)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor, dy: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gx = ctx.g(x)
        by_g = torch.autograd.grad(gx, [x, *ctx.g.parameters()], dy)
        with torch.enable_grad():
            y = (y - gx).detach().requires_grad_()
            fy = ctx.f(y)
        dx = dx + by_g[0]
        by_f = torch.autograd.grad(fy, [y, *ctx.f.parameters()], dx)
        return dx, dy + by_f[0], None, None, *by_f[1:], *by_g[1:]


class Reversible(nn.Module):
    """A block that keeps no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(WIDTH // 2), Block(WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        weights = (*self.f.parameters(), *self.g.parameters())
        return torch.cat(Reversed.apply(left, right, self.f, self.g, *weights), -1)


def reversible() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Reversible(), Reversible(), nn.Linear(WIDTH, WIDTH))


class SparseEmbeddings(nn.Module):
    """Embeddings with sparse gradients, one of them of whole samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.bag(x)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scripted(nn.Module):
    """Parts are compiled by torch.jit, one of them among blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = torch.jit.script(Mlp(blocks=1)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), torch.jit.script(Block()), Block(), torch.jit.script(Block())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


PEOPLE = [
    Case("lora_adapters", lora_adapters),
    Case("packed_sequences", PackedSequences, tokens, next_token),
    Case("gradient_penalty", Mlp, loss=gradient_penalty),
    Case("learns_within_its_forward", LearnsWithin, loss=lambda m, b: F.mse_loss(m(b["x"], b["y"]), b["y"])),
    Case("experts_chosen_by_data", lambda: nn.Sequential(Experts(), Experts())),
    Case("reversible_blocks", reversible),
    Case("sparse_embeddings", SparseEmbeddings, tokens, next_token),
    Case("scripted_parts", Scripted),
]
