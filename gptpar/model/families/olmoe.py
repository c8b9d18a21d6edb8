"""OLMoE (Muennighoff et al. 2024): Llama with experts in every block, and norms of all queries and of all keys."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig
from gptpar.model.families.llama import fields_like_llama, like_llama
from gptpar.model.families.mixtures import mixture, mixture_fields


def olmoe(config: HfConfig) -> ModelFlags:
    """The flags of an ``OlmoeForCausalLM``."""
    config.require("attention_bias", False, "biases are in all linear layers, in the QKV projection alone, or in none")
    if (limit := config.get("clip_qkv", 0.0)) != 0:
        config.problems.append(f"clip_qkv is {limit:g}, and gptpar clips neither queries nor keys nor values.")
    width = config["hidden_size"] // config["num_attention_heads"]
    config.require("head_dim", width, "the norm of all queries has the width of the model")
    experts = mixture(
        config,
        width=config["intermediate_size"],
        normalised=config.get("norm_topk_prob", False),
        blocks=[True] * config["num_hidden_layers"],
    )
    return like_llama(config, norm_eps=1e-5, qk_layernorm=True, qk_layernorm_scope="width", **experts)


def olmoe_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(
        model,
        "OlmoeForCausalLM",
        attention_bias=False,
        clip_qkv=None,
        intermediate_size=model.width_of_experts(model.ffn_hidden_size),
        norm_topk_prob=not model.moe_router_pre_softmax,
        pad_token_id=None,  # transformers' default may be beyond small vocabularies
        **mixture_fields(model),
    )
