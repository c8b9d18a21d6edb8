"""Modules as people bring them, each small: adapters, recurrent nets, diffusion, contrast, meta-learning, experts."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.any_module.case import LENGTH, VOCABULARY, WIDTH, Batch, Case, Model, images, next_token, tokens
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


class TimedResidual(nn.Module):
    """Two convolutions, modulated by an embedding of the time."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, before), nn.GroupNorm(2, after)])
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(WIDTH, 2 * after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(F.silu(self.norms[0](x)))
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.second(F.silu(self.norms[1](hidden) * (1 + scale) + shift))


class UNet(nn.Module):
    """Of a diffusion model: down, up, and connections between."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([TimedResidual(8, 8), nn.Conv2d(8, 8, 3, 2, 1), TimedResidual(8, 16)])
        self.up = nn.ModuleList([TimedResidual(32, 8), nn.ConvTranspose2d(8, 8, 4, 2, 1), TimedResidual(16, 8)])
        self.head = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2)).to(x)
        angles = time[:, None].to(x) * rates
        time, x, skips = self.time(torch.cat([angles.sin(), angles.cos()], -1)), self.stem(x), []
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, TimedResidual) else layer(x)
            skips += [x] if isinstance(layer, TimedResidual) else []
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1), time) if isinstance(layer, TimedResidual) else layer(x)
        return self.head(x)


def noise_of_images(model: Model, batch: Batch) -> torch.Tensor:
    """The noise is that of the batch, drawn anew."""
    generator = torch.Generator().manual_seed(10 * batch["step"] + batch["micro"])
    noise = torch.randn(batch["x"].shape, generator=generator, dtype=torch.float64)
    return F.mse_loss(model(0.8 * batch["x"] + 0.6 * noise, torch.arange(len(noise))), noise)


class TwoTowers(nn.Module):
    """Two encoders and a temperature, which is a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Mlp(blocks=2), Mlp(blocks=2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, tower: str) -> torch.Tensor:
        encoded = F.normalize(getattr(self, tower)(x), dim=-1)
        return encoded * self.temperature.exp() if tower == "left" else encoded


def contrast(model: Model, batch: Batch) -> torch.Tensor:
    """Two calls, each of one tower."""
    scores = model(batch["x"], tower="left") @ model(batch["y"], tower="right").t()
    return F.cross_entropy(scores, torch.arange(len(scores)))


def gradient_penalty(model: Model, batch: Batch) -> torch.Tensor:
    """The gradient with respect to the input is part of the loss."""
    x = batch["x"].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


def adversarial(model: Model, batch: Batch) -> torch.Tensor:
    """The input is moved against the model first."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(model(x), batch["y"]), x)
    return F.mse_loss(model(batch["x"] + 0.1 * slope.sign()), batch["y"])


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


def experts_in_blocks() -> nn.Module:
    return nn.Sequential(Experts(), Experts())


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


class EmbeddingThenBlocks(nn.Module):
    """An embedding whose gradient may be sparse."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sparse_embedding() -> nn.Module:
    return EmbeddingThenBlocks(nn.Embedding(VOCABULARY, WIDTH, sparse=True))


def sparse_embedding_bag() -> nn.Module:
    return EmbeddingThenBlocks(nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=True))


def first_token(model: Model, batch: Batch) -> torch.Tensor:
    """Of each sample's first token under its logits."""
    return F.cross_entropy(model(batch["x"]), batch["x"][:, 0])


def spectral_norm_by_hooks() -> nn.Module:
    """The older functions of torch, which keep the made weight as an attribute."""
    older = nn.utils.spectral_norm
    blocks = [nn.Sequential(older(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU()) for _ in range(2)]
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), *blocks, older(nn.Linear(WIDTH, WIDTH)))


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
    Case("unet_of_diffusion", UNet, images, noise_of_images),
    Case("two_towers", TwoTowers, loss=contrast),
    Case("gradient_penalty", Mlp, loss=gradient_penalty),
    Case("adversarial_training", Mlp, loss=adversarial),
    Case("learns_within_its_forward", LearnsWithin, loss=lambda m, b: F.mse_loss(m(b["x"], b["y"]), b["y"])),
    Case("experts_chosen_by_data", experts_in_blocks),
    Case("reversible_blocks", reversible),
    Case("sparse_embedding", sparse_embedding, tokens, next_token),
    Case("sparse_embedding_bag", sparse_embedding_bag, tokens, first_token),
    Case("spectral_norm_by_hooks", spectral_norm_by_hooks),
    Case("scripted_parts", Scripted),
]
