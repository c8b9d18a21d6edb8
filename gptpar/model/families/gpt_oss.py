"""gpt-oss (OpenAI 2025): experts with biases and a clamped gate, attention sinks, windows in every second layer, YaRN.

Its published experts are in MXFP4, whose rows are those of our parameters; in bf16 they are stored transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.activations import QUICK_SLOPE
from gptpar.model.block import Block
from gptpar.model.families.fields import HfConfig, shortest_period, window_fields
from gptpar.model.families.llama import LLAMA_NAMES, fields_like_llama, like_llama
from gptpar.model.families.mixtures import mixture, mixture_fields
from gptpar.model.families.names import WHOLE, Within


def gpt_oss(config: HfConfig) -> ModelFlags:
    """The flags of a ``GptOssForCausalLM``; its ``hidden_act`` changes nothing."""
    config.require("attention_bias", True, "biases are in all linear layers or in none")
    config.require("swiglu_alpha", QUICK_SLOPE, "that is the slope of --quick-geglu")
    if not (config.get("rope_parameters", {}) or config.get("rope_scaling", {})):
        config.problems.append("rope_parameters is missing, and transformers would take YaRN's of its own: say them.")
    layers = config["num_hidden_layers"]
    windows: dict[str, Any] = {}
    if "S" in (pattern := config.window_pattern([layer % 2 == 0 for layer in range(layers)])):
        windows = {"window_size": config.size("sliding_window", 128), "window_pattern": shortest_period(pattern)}
    experts = mixture(config, width=config["intermediate_size"], normalised=True, blocks=[True] * layers)
    options: dict[str, Any] = {
        "swiglu": False,
        "mlp_activation": "quick_geglu",
        "activation_func_clamp_value": config.positive("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
    }
    return like_llama(config, query_groups=8, rope_theta=150_000, norm_eps=1e-5, **options, **windows, **experts)


def gpt_oss_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    windows = window_fields(model)
    return fields_like_llama(
        model,
        "GptOssForCausalLM",
        attention_bias=True,
        intermediate_size=model.width_of_experts(model.ffn_hidden_size),
        layer_types=windows["layer_types"],
        pad_token_id=None,
        sliding_window=windows["sliding_window"] or 128,  # transformers makes the mask in any case
        swiglu_alpha=QUICK_SLOPE,
        swiglu_limit=model.activation_func_clamp_value,
        **mixture_fields(model, "num_local_experts"),
    )


def _block(experts: Mapping[str, Mapping[str, Within]]) -> Any:
    """Names of a block with these names of its experts."""
    others = {
        "attention.sinks": {"self_attn.sinks": WHOLE},
        "mlp.router": {"mlp.router": WHOLE},
        "mlp.up_bias": {"mlp.experts.gate_up_proj_bias": Within(lambda ours: ours.transpose(1, 2), merged=1, dims=2)},
        "mlp.down_bias": {"mlp.experts.down_proj_bias": WHOLE},
    }

    def names(block: Block) -> Mapping[str, Mapping[str, Within]]:
        return {**LLAMA_NAMES.block(block), **others, **experts}

    return names


GPT_OSS_NAMES = replace(
    LLAMA_NAMES,
    block=_block(
        {
            # Gates and values alternate in the columns of [experts, inputs, 2 x outputs].
            "mlp.up": {"mlp.experts.gate_up_proj": Within(lambda ours: ours.permute(0, 3, 2, 1), merged=2, dims=3)},
            "mlp.down": {"mlp.experts.down_proj": Within(lambda ours: ours.transpose(1, 2), dims=3)},
        }
    ),
)
GPT_OSS_MXFP4_NAMES = replace(
    LLAMA_NAMES,
    block=_block(
        {
            "mlp.up": {"mlp.experts.gate_up_proj_blocks": Within(lambda ours: ours.transpose(1, 2), merged=1, dims=3)},
            "mlp.down": {"mlp.experts.down_proj_blocks": Within(lambda ours: ours, dims=3)},
        }
    ),
)
"""Tensors as :mod:`gptpar.exchange.files.mxfp4` gives them."""
