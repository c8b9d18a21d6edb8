"""SmolLM3 (Bakouch et al. 2025): Llama with layers that have no positions, which alone may have sliding windows."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig, rotary_layers, shortest_period, window_fields
from gptpar.model.families.llama import fields_like_llama, like_llama


def smollm3(config: HfConfig) -> ModelFlags:
    """The flags of a ``SmolLM3ForCausalLM``."""
    biases, layers = config.get("attention_bias", False), config["num_hidden_layers"]
    config.require("mlp_bias", biases, "biases are in all linear layers or in none", default=False)
    every = config.size("no_rope_layer_interval", 4)
    has_positions = config.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])[:layers]
    pattern = "".join("R" if has else "N" for has in has_positions)
    if len(pattern) < layers:
        config.problems.append(f"no_rope_layers has {len(pattern)} numbers, and the model has {layers} layers.")
    return like_llama(
        config,
        query_groups=4,
        rope_theta=2_000_000,
        add_bias_linear=biases,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
        rope_pattern=shortest_period(pattern) if "N" in pattern else None,
        **config.windows([has == "N" and bool(config.get("sliding_window", 0)) for has in pattern]),
    )


def smollm3_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(
        model,
        "SmolLM3ForCausalLM",
        attention_bias=model.add_bias_linear,
        mlp_bias=model.add_bias_linear,
        pad_token_id=None,  # transformers' default is beyond small vocabularies
        no_rope_layers=[int(has) for has in rotary_layers(model)],
        **window_fields(model),
    )
