"""GPT-NeoX and Pythia (Black et al. 2022): rotary positions on a part of each head, parallel residual, exact GELU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.block import Block
from gptpar.model.families.fields import HfConfig, activation_field, positions_field, rotary_fields
from gptpar.model.families.names import WHOLE, WeightNames, Within


def gpt_neox(config: HfConfig) -> ModelFlags:
    """The flags of a ``GPTNeoXForCausalLM``."""
    config.require("attention_bias", True, "biases are in all linear layers or in none")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    positions = config.rotary(10000, 0.25)
    flags = ModelFlags(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=config["max_position_embeddings"],
        max_position_embeddings=config["max_position_embeddings"],
        padded_vocab_size=config["vocab_size"],
        normalization="LayerNorm",
        norm_epsilon=config.positive("layer_norm_eps", 1e-5),
        use_parallel_residual=config.get("use_parallel_residual", True),
        mlp_activation=config.activation("hidden_act", "gelu"),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        init_method_std=config.get("initializer_range", 0.02),
        attention_dropout=config.get("attention_dropout", 0.0),
        hidden_dropout=config.get("hidden_dropout", 0.0),
    )
    return dataclasses.replace(flags, **positions)


def gpt_neox_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "hidden_act": activation_field(model),
        "hidden_dropout": model.hidden_dropout,
        "hidden_size": model.hidden_size,
        "initializer_range": model.init_method_std,
        "intermediate_size": model.ffn_hidden_size,
        "layer_norm_eps": model.norm_epsilon,
        "max_position_embeddings": positions_field(model),
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_layers,
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_percent,
        **rotary_fields(model, partial_rotary_factor=model.rotary_percent),
        "tie_word_embeddings": model.tied,
        "use_parallel_residual": model.use_parallel_residual,
    }


def _block(block: Block) -> Mapping[str, Mapping[str, Within]]:
    """Its QKV rows are ordered head by head, as ours are where each group has one query head."""
    return {
        "attention_norm": {"input_layernorm": WHOLE},
        "attention.qkv": {"attention.query_key_value": WHOLE},
        "attention.out": {"attention.dense": WHOLE},
        "mlp_norm": {"post_attention_layernorm": WHOLE},
        "mlp.up": {"mlp.dense_h_to_4h": WHOLE},
        "mlp.down": {"mlp.dense_4h_to_h": WHOLE},
    }


GPT_NEOX_NAMES = WeightNames(
    base="gpt_neox.",
    outer={"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    blocks="layers",
    block=_block,
)
