"""Flags of the model's shape and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from gptpar.config.fields import Open, flag, on_unless
from gptpar.config.presets import PRESETS
from gptpar.config.sections.experts import ExpertOptions

LLAMA_3_CONTEXT = 8192
"""Tokens of a sample in the first training of Llama 3.1, for whose form of rotary positions it is the default."""

SCALED_BY: dict[str, tuple[str, ...]] = {
    "rope_scaling_factor": ("linear", "dynamic", "llama3", "yarn"),
    "original_max_position_embeddings": ("dynamic", "llama3", "yarn"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor"), ("yarn",)),
    "yarn_correction_range_round_to_int": ("yarn",),
}
"""A field of scaled rotary frequencies -> the values of ``--rope-scaling-type`` with which it has a meaning."""

STRETCHING = frozenset({"rotary_base", "rope_scaling_type", *SCALED_BY})
"""Fields of rotary positions that a new run with a trained model's weights may set otherwise, for longer samples."""

GATES = ("geglu", "geglu_tanh", "quick_geglu", "reglu", "liglu")
"""Activations that multiply one half of the first layer's output by a function of the other half; so does SwiGLU."""

FUSED_GELU, UNFUSED_GELU = "gelu_tanh", "gelu"
"""Megatron-LM's GELU: fused with a bias it is the tanh form, else the exact one."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ExpertOptions, Generic[Open]):
    """A GPT, completely described."""

    position_embedding_type: str = flag(
        "learned_absolute",
        "how positions enter the model; alibi lowers a score by the distance of query and key (ALiBi)",
        choices=("learned_absolute", "rope", "alibi", "none"),
        spellings={"absolute": "learned_absolute", "rotary": "rope"},
    )
    rotary_base: int = flag(
        10000,
        "base of the rotary frequencies",
        names=("--rotary-position-embeddings-theta", "--rotary-theta"),
        above=0,
        most=10**12,
    )
    rotary_percent: float = flag(1.0, "share of each head's width that is rotated", above=0, most=1)
    rope_pattern: str | None = flag(
        None,
        "layers with rotary positions: a letter a layer, R rotary or N none, repeated over the layers (default: R)",
        metavar="RRRN",
    )
    rope_scaling_type: str | None = flag(
        None,
        "how rotary frequencies are lowered for samples longer than those of the first training: all of them, by the "
        "base (NTK-aware), as Llama 3.1, or as YaRN",
        choices=("linear", "dynamic", "llama3", "yarn"),
    )
    rope_scaling_factor: float = flag(
        8.0,
        "with --rope-scaling-type: divisor of the lowest frequencies",
        names=("--rotary-scaling-factor", "--yarn-rotary-scaling-factor"),
        least=1,
    )
    original_max_position_embeddings: int | None = flag(
        None,
        "with dynamic, llama3 (default: 8192) and yarn: tokens of a sample of the first training",
        names=("--rope-scaling-original-max-position-embeddings", "--yarn-original-max-position-embeddings"),
        least=1,
        most=100_000_000,
    )
    low_freq_factor: float = flag(
        1.0, "with llama3: frequencies of at most as many turns in such a sample are lowered by the factor", above=0
    )
    high_freq_factor: float = flag(4.0, "with llama3: frequencies of at least as many turns are kept", above=0)
    yarn_beta_fast: float = flag(
        32.0, "with yarn: turns in such a sample from which frequencies are kept", names=("--beta-fast",), above=0
    )
    yarn_beta_slow: float = flag(
        1.0, "with yarn: turns up to which they are lowered by the factor", names=("--beta-slow",), above=0
    )
    yarn_attention_factor: float | None = flag(
        None, "with yarn: factor of queries and of keys (default: 0.1 ln(factor) + 1)", above=0
    )
    yarn_correction_range_round_to_int: bool = on_unless(
        "--no-yarn-correction-range-round-to-int",
        "do not round the channels between YaRN's two limits to whole pairs",
    )
    normalization: str = flag(
        "LayerNorm",
        "kind of normalisation",
        choices=("LayerNorm", "RMSNorm"),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = flag(1e-5, "added to the variance in norms", names=("--layernorm-epsilon",), above=0)
    apply_layernorm_1p: bool = flag(False, "norms store their weights less one, and begin at 0")
    embed_layernorm: bool = flag(False, "normalise token embeddings, before positions are added (BLOOM)")
    norm_placement: str = flag(
        "pre",
        "norms of a block: before attention and MLP (pre), after them and before the residual sum (post, as OLMo-2), "
        "or both (peri)",
        choices=("pre", "post", "peri"),
    )
    use_parallel_residual: bool = flag(
        False, "attention and MLP of a block read the same input, and their outputs are added to it (GPT-NeoX)"
    )
    qk_layernorm: bool = flag(
        False, "normalise each head's queries and keys by --normalization, before rotary positions"
    )
    qk_layernorm_scope: str = flag(
        "head",
        "channels over which --qk-layernorm normalises: those of a head (Qwen3), or of all heads together (OLMo-2)",
        choices=("head", "width"),
    )
    attention_output_gate: bool = flag(
        False, "multiply attention's output by the sigmoid of a gate that is projected beside the queries (Qwen3-Next)"
    )
    softmax_type: str = flag(
        "vanilla",
        "softmax of attention: of a token's scores alone, or beside a learned logit of each head, the attention sink "
        "(learnable)",
        choices=("vanilla", "learnable"),
    )
    window_size: int | None = flag(
        None, "tokens that a sliding-window layer sees, including the token itself", least=1, most=100_000_000
    )
    window_pattern: str | None = flag(
        None,
        "layers with --window-size: a letter a layer, S sliding or F full, repeated over the layers (default: S)",
        metavar="SSSF",
    )
    swiglu: bool = flag(False, "gated SiLU MLP instead of GELU")
    mlp_activation: str = flag(
        FUSED_GELU,
        "the MLP's activation function without --swiglu (without biases the default is gelu, as in Megatron-LM); "
        "geglu, geglu_tanh, quick_geglu, reglu and liglu are gates, as SwiGLU is: of the exact GELU, its tanh form, "
        "x * sigmoid(1.702 x), the ReLU, and none",
        choices=(FUSED_GELU, UNFUSED_GELU, "squared_relu", *GATES),
        spellings={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "squared_relu"},
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "c: in an MLP with a gate, clamp the gate's input to at most c, and the other half to -c ... c (gpt-oss: 7)",
        above=0,
    )
    glu_linear_offset: float = flag(
        0.0, "in an MLP with a gate, add this to the half that the gate multiplies (gpt-oss: 1)"
    )
    add_bias_linear: bool = on_unless(
        "--disable-bias-linear", "no biases in linear layers, nor in experts and their router"
    )
    add_qkv_bias: bool = flag(False, "bias on the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer a matrix of its own")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this (whatever the layout)", least=1, most=10_000_000
    )
    pad_vocab_size_to: int | None = flag(
        None,
        "rows of the embedding, in place of a multiple: the same for tokenizers of different sizes",
        names=("--padded-vocab-size",),
        least=1,
        most=10_000_000,
    )
    softmax_over_padding: bool = flag(
        False,
        "rows that pad the vocabulary take part in the softmax, as in Megatron-LM (default: they change no number)",
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", least=0)
    logit_softcap: float = flag(
        0.0, "c: logits become c * tanh(logits / c); 0 is off", names=("--output-logit-softcapping",), least=0
    )
    z_loss_weight: float = flag(
        0.0,
        "in training, add this times the mean of logsumexp(logits)^2 to the loss; 0 is off",
        names=("--z-loss-strength",),
        least=0,
    )
    mup: bool = flag(
        False,
        "muP: a learning rate that was tuned on a model of --mup-base-hidden-size holds for this one "
        "(gptpar/model/mup.py)",
    )
    mup_base_hidden_size: int | None = flag(
        None, "with --mup: the --hidden-size of the model that was tuned", least=1, most=1_000_000
    )
    mup_base_kv_channels: int | None = flag(
        None,
        "with --mup: the --kv-channels of that model (default: this model's; wider models then have more heads)",
        least=1,
        most=1_000_000,
    )
    attention_dropout: float = flag(0.1, "dropout on attention probabilities")
    hidden_dropout: float = flag(0.1, "dropout on embeddings and on each block's two outputs")

    num_layers: int | Open = flag(None, "number of transformer blocks", least=1, most=10_000)
    hidden_size: int | Open = flag(None, "width of the residual stream", least=1, most=1_000_000)
    ffn_hidden_size: int | Open = flag(
        None, "width of the MLP (default: 4 x hidden, with a gate 8/3 x hidden)", least=1, most=10_000_000
    )
    num_attention_heads: int | Open = flag(None, "number of query heads", least=1, most=100_000)
    num_query_groups: int | Open = flag(
        None,
        "number of key/value heads (default: one a query head)",
        names=("--num-key-value-heads",),
        least=1,
        most=100_000,
    )
    kv_channels: int | Open = flag(None, "width of one head (default: hidden / heads)", least=1, most=1_000_000)
    seq_length: int | Open = flag(None, "tokens in one sample", least=1, most=100_000_000)
    max_position_embeddings: int | Open = flag(
        None, "learned positions (default: --seq-length)", least=1, most=100_000_000
    )
    padded_vocab_size: int | Open = None  # type: ignore[assignment]
    """Rows of the embedding; 0 until the tokenizer has been read, where ``--vocab-size`` does not say them."""
    softmax_vocab_size: int | Open = None  # type: ignore[assignment]
    """Rows over which the softmax is: the first ones, one a token id; the others pad the vocabulary. With
    ``--softmax-over-padding``, and in models of other programs, all rows. Where a checkpoint does not say it: all."""

    @property
    def gated(self) -> bool:
        """Whether one half of the MLP's first layer is multiplied by an activation of the other half."""
        return self.swiglu or self.mlp_activation in GATES

    @property
    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def tied(self) -> bool:
        """Whether the output layer reuses the embedding matrix."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ModelConfig[None]):
    """A GPT's shape and options."""

    preset: str | None = flag(
        None, "fill the model's shape from this preset", choices=tuple(PRESETS), before="num_layers"
    )
    group_query_attention: bool = flag(
        False, "share each key/value head among several query heads", before="num_query_groups"
    )
    glu_activation: str | None = flag(
        None, "same as --swiglu, or as --mlp-activation with a gate (BigScience)", choices=("swiglu", *GATES)
    )
    quick_geglu: bool = flag(False, "same as --mlp-activation quick_geglu")
    squared_relu: bool = flag(False, "same as --mlp-activation squared_relu")
    bias_gelu_fusion: bool = on_unless(
        "--no-bias-gelu-fusion",
        "no tanh form of GELU: same as --mlp-activation gelu, as in Megatron-LM, unless another function is given",
    )
    use_rotary_position_embeddings: bool = flag(False, "same as --position-embedding-type rope")
    use_rope_scaling: bool = flag(False, "same as --rope-scaling-type llama3")
    no_rope_freq: str | None = flag(
        None,
        "every N-th layer has no positions, or a list with 1 for such layers (see --rope-pattern)",
        metavar="N|LIST",
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "with --window-size: every N-th layer is full, or a list with 0 for such layers (see --window-pattern)",
        metavar="N|LIST",
    )
    add_position_embedding: bool = on_unless(
        "--no-position-embedding", "no positions: same as --position-embedding-type none"
    )
