"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in all blocks, in every Nth one, or in those that a list leaves."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig, windows_of
from gptpar.model.families.llama import fields_like_llama, like_llama
from gptpar.model.families.mixtures import blocks_of, mixture, mixture_fields


def qwen3_moe(config: HfConfig) -> ModelFlags:
    """The flags of a ``Qwen3MoeForCausalLM``."""
    config.require("attention_bias", False, "biases are in all linear layers, in the QKV projection alone, or in none")
    every, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    experts = mixture(
        config,
        width=config["moe_intermediate_size"],
        normalised=config.get("norm_topk_prob", False),
        blocks=[layer not in dense and (layer + 1) % every == 0 for layer in range(config["num_hidden_layers"])],
    )
    # Its windows are in all layers or in none, whatever max_window_layers says.
    window = config["sliding_window"] if config.get("use_sliding_window", False) else None
    return like_llama(config, query_groups=4, qk_layernorm=True, window_size=window, **experts)


def qwen3_moe_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    window = windows_of(model)[0]
    return fields_like_llama(
        model,
        "Qwen3MoeForCausalLM",
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[layer for layer, has in enumerate(blocks_of(model)) if not has],
        moe_intermediate_size=model.width_of_experts(model.ffn_hidden_size),
        norm_topk_prob=not model.moe_router_pre_softmax,
        sliding_window=window,
        use_sliding_window=window is not None,
        **mixture_fields(model),
    )
