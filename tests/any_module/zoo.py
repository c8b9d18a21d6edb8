"""The models of the proof: transformers' GPT-2 and Llama, a CNN with BatchNorm, an MLP."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.any_module.case import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Batch,
    Case,
    Model,
    by_name,
    entropy,
    images,
    next_token_loss,
    tokens,
)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    """A layer in, blocks, a layer out."""

    def __init__(self, width: int = WIDTH, blocks: int = 3):
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., WIDTH] -> the same."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, ReLU in place, added to the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, channels, height, width] -> the same."""
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


class Cnn(nn.Module):
    """Two stages of blocks with BatchNorm."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(ConvBlock(channels), nn.AvgPool2d(2), ConvBlock(channels))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, 3, height, width] -> logits [samples, 10]."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def gpt2() -> nn.Module:
    """Transformers' GPT-2, its head tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    """Transformers' Llama: grouped queries, untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Fp64Norm(LlamaRMSNorm):
        """Transformers' own rounds to fp32, which makes of a deviation of 1e-17 now and then one of 1e-8."""

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",  # the eager one rounds its softmax to fp32
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = Fp64Norm
    return model


def checkpointed(build: Callable[[], nn.Module], use_reentrant: bool) -> nn.Module:
    """The same with transformers' own gradient checkpointing."""
    model = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})  # type: ignore
    return model


def language_model(model: Model, batch: Batch) -> torch.Tensor:
    """The loss of a transformers model, called by keywords."""
    return next_token_loss(model(input_ids=batch["x"], use_cache=False).logits, batch["x"])


def images_channels_last(generator: torch.Generator) -> Batch:
    """Like :func:`images`, with other strides."""
    batch = images(generator)
    return {**batch, "x": batch["x"].contiguous(memory_format=torch.channels_last)}


def cnn_channels_last() -> nn.Module:
    """Its convolutions' weights have other strides, too, whenever they are used."""
    model = Cnn().to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(_assert_strides)
    return model


def _assert_strides(module: nn.Module, args: object) -> None:
    assert module.weight.is_contiguous(memory_format=torch.channels_last), "the user's strides are lost"  # type: ignore


ZOO = by_name(
    [
        Case("mlp", Mlp),
        Case("gpt2", gpt2, tokens, language_model),
        Case("gpt2_checkpointed", partial(checkpointed, gpt2, False), tokens, language_model),
        Case("gpt2_checkpointed_reentrant", partial(checkpointed, gpt2, True), tokens, language_model),
        Case("llama", llama, tokens, language_model),
        Case("llama_checkpointed", partial(checkpointed, llama, False), tokens, language_model),
        Case("llama_checkpointed_reentrant", partial(checkpointed, llama, True), tokens, language_model),
        Case("cnn", Cnn, images, entropy),
        Case("cnn_channels_last", cnn_channels_last, images_channels_last, entropy),
    ]
)
