"""Qwen3 (Yang et al. 2025): Llama whose queries and keys are normalised head by head, with heads of any width."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig, window_fields
from gptpar.model.families.llama import fields_like_llama, like_llama


def qwen3(config: HfConfig) -> ModelFlags:
    """The flags of a ``Qwen3ForCausalLM``."""
    config.require("attention_bias", False, "biases are in all linear layers, in the QKV projection alone, or in none")
    head_width = config.size("head_dim", 128)
    return like_llama(config, query_groups=32, kv_channels=head_width, qk_layernorm=True, **config.windows())


def qwen3_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(model, "Qwen3ForCausalLM", attention_bias=False, **window_fields(model))
