"""The model's shape and options."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag, on_unless
from gptpar.config.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a GPT that are complete as they are typed."""

    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter the model", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(
        10000, "base of the rotary frequencies", names=("--rotary-position-embeddings-theta",), above=0, most=10**12
    )
    rotary_percent: float = flag(1.0, "share of each head's width that is rotated", above=0, most=1)
    normalization: str = flag(
        "LayerNorm",
        "kind of normalisation",
        choices=("LayerNorm", "RMSNorm"),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = flag(1e-5, "added to the variance in norms", names=("--layernorm-epsilon",), above=0)
    qk_layernorm: bool = flag(
        False, "normalise each head's queries and keys, before rotary positions, as --normalization says"
    )
    swiglu: bool = flag(False, "gated SiLU MLP instead of GELU")
    add_bias_linear: bool = on_unless("--disable-bias-linear", "no biases in linear layers")
    add_qkv_bias: bool = flag(False, "bias on the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer a matrix of its own")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this (whatever the layout)", least=1, most=10_000_000
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", least=0)
    attention_dropout: float = flag(0.1, "dropout on attention probabilities")
    hidden_dropout: float = flag(0.1, "dropout on embeddings and on each block's two outputs")

    @property
    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def tied(self) -> bool:
        """Whether the output layer reuses the embedding matrix."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ModelOptions):
    """A GPT's shape and options."""

    preset: str | None = flag(None, "fill the model's shape by its usual name", choices=tuple(PRESETS))
    num_layers: int | None = flag(None, "number of transformer blocks", least=1, most=10_000)
    hidden_size: int | None = flag(None, "width of the residual stream", least=1, most=1_000_000)
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP (default: 4 x hidden, with --swiglu 8/3 x hidden)", least=1, most=10_000_000
    )
    num_attention_heads: int | None = flag(None, "number of query heads", least=1, most=100_000)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(
        None,
        "number of key/value heads (default: one a query head)",
        names=("--num-key-value-heads",),
        least=1,
        most=100_000,
    )
    kv_channels: int | None = flag(None, "width of one head (default: hidden / heads)", least=1, most=1_000_000)
    seq_length: int | None = flag(None, "tokens in one sample", least=1, most=100_000_000)
    max_position_embeddings: int | None = flag(
        None, "learned positions (default: --seq-length)", least=1, most=100_000_000
    )
    use_rotary_position_embeddings: bool = flag(False, "same as --position-embedding-type rope")
    add_position_embedding: bool = on_unless(
        "--no-position-embedding", "no positions: same as --position-embedding-type none"
    )

    padded_vocab_size: int | None = None
    """Rows of the embedding: what a checkpoint says; it is never typed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """A GPT, completely described."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; as many as query heads without grouped-query attention."""
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    """Positions that can be learned; read where ``position_embedding_type`` says that they are."""
    padded_vocab_size: int
    """Rows of the embedding; 0 until the tokenizer has been read, where ``--vocab-size`` does not say them."""
