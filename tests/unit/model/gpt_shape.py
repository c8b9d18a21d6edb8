"""The fields of a model's configuration that its counts depend on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTShape:
    """GPT-2 of 124M, unless told otherwise."""

    num_layers: int = 12
    hidden_size: int = 768
    ffn_hidden_size: int = 3072
    num_attention_heads: int = 12
    num_query_groups: int = 12
    kv_channels: int = 64
    seq_length: int = 1024
    max_position_embeddings: int = 1024
    padded_vocab_size: int = 50304
    softmax_vocab_size: int = 50257
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    apply_layernorm_1p: bool = False
    embed_layernorm: bool = False
    norm_placement: str = "pre"
    use_parallel_residual: bool = False
    qk_layernorm: bool = False
    qk_layernorm_scope: str = "head"
    attention_output_gate: bool = False
    window_size: int | None = None
    window_pattern: str | None = None
    mup: bool = False
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu
