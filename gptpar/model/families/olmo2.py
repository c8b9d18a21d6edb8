"""OLMo-2 (OLMo et al. 2024): Llama with norms after attention and MLP, and norms of all queries and of all keys."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig
from gptpar.model.families.llama import fields_like_llama, like_llama


def olmo2(config: HfConfig) -> ModelFlags:
    """The flags of an ``Olmo2ForCausalLM``."""
    config.require("attention_bias", False, "biases are in all linear layers, in the QKV projection alone, or in none")
    return like_llama(config, norm_eps=1e-5, norm_placement="post", qk_layernorm=True, qk_layernorm_scope="width")


def olmo2_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(model, "Olmo2ForCausalLM", attention_bias=False)
