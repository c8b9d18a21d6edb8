"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before attention and MLP, biases, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.block import Block
from gptpar.model.families.fields import HfConfig, activation_field
from gptpar.model.families.names import TRANSPOSED, WHOLE, WeightNames, Within, all_q_all_k_all_v


def gpt2(config: HfConfig) -> ModelFlags:
    """The flags of a ``GPT2LMHeadModel``."""
    config.require("scale_attn_weights", True, "scores are divided by the root of a head's width")
    config.require("scale_attn_by_inverse_layer_idx", False, "every layer scales its scores alike")
    config.require("add_cross_attention", False, "there is no encoder")
    config.require("embd_pdrop", config.get("resid_pdrop", 0.1), "one dropout holds for all hidden states", default=0.1)
    hidden, heads = config["n_embd"], config["n_head"]
    length = config.size("n_positions", config.size("n_ctx", 1024))
    return ModelFlags(
        num_layers=config["n_layer"],
        hidden_size=hidden,
        ffn_hidden_size=config.size("n_inner", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=length,
        max_position_embeddings=length,
        padded_vocab_size=config["vocab_size"],
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=config.positive("layer_norm_epsilon", 1e-5),
        mlp_activation=config.activation("activation_function", "gelu_new"),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
        init_method_std=config.get("initializer_range", 0.02),
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
    )


def gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": activation_field(model),
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "layer_norm_epsilon": model.norm_epsilon,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_positions": model.max_position_embeddings,
        "tie_word_embeddings": model.tied,
    }


def _block(block: Block) -> Mapping[str, Mapping[str, Within]]:
    return {
        "attention_norm": {"ln_1": WHOLE},
        "attention.qkv": {"attn.c_attn": all_q_all_k_all_v(block.attention)},
        "attention.out": {"attn.c_proj": TRANSPOSED},
        "mlp_norm": {"ln_2": WHOLE},
        "mlp.up": {"mlp.c_fc": TRANSPOSED},
        "mlp.down": {"mlp.c_proj": TRANSPOSED},
    }


GPT2_NAMES = WeightNames(
    base="transformer.",
    outer={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    blocks="h",
    block=_block,
)
