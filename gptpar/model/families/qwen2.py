"""Qwen2 (Yang et al. 2024): Llama with biases of queries, keys and values, and sliding windows in some layers."""

from __future__ import annotations

from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.families.fields import HfConfig, window_fields
from gptpar.model.families.llama import fields_like_llama, like_llama


def qwen2(config: HfConfig) -> ModelFlags:
    """The flags of a ``Qwen2ForCausalLM``."""
    return like_llama(config, query_groups=32, add_qkv_bias=True, **config.windows())


def qwen2_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(model, "Qwen2ForCausalLM", **window_fields(model))
