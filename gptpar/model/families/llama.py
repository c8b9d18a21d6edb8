"""Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, grouped queries, no biases.

Qwen2, Qwen3 and OLMo-2 differ from it in a few options; :func:`like_llama` has the options that they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.block import Block
from gptpar.model.experts.layer import Experts
from gptpar.model.families.fields import HfConfig, gate_field, positions_field, rotary_fields
from gptpar.model.families.mixtures import expert_names
from gptpar.model.families.names import WHOLE, WeightNames, Within, part, projections


def like_llama(
    config: HfConfig,
    *,
    rope_theta: float = 10000,
    norm_eps: float = 1e-6,
    query_groups: int | None = None,
    **options: Any,
) -> ModelFlags:
    """The flags that the family's models share.

    Args:
        rope_theta, norm_eps: the family's default values.
        query_groups: ``num_key_value_heads`` where the field is missing; ``None``: all heads, as where it is ``null``.
        **options: further flags.
    """
    gate, positions = config.gate("hidden_act"), config.rotary(rope_theta)
    if positions["rotary_percent"] != 1:
        config.problems.append(
            f"partial_rotary_factor is {positions['rotary_percent']:g}; transformers' models of this family ignore it "
            "and turn whole heads: leave it out, or set it to 1."
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.size("num_key_value_heads", heads, query_groups)
    shared: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": config.size("head_dim", hidden // heads),
        "seq_length": config["max_position_embeddings"],
        "max_position_embeddings": config["max_position_embeddings"],
        "padded_vocab_size": config["vocab_size"],
        **positions,
        "normalization": "RMSNorm",
        "norm_epsilon": config.positive("rms_norm_eps", norm_eps),
        **gate,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "init_method_std": config.get("initializer_range", 0.02),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }
    return ModelFlags(**(shared | options))


def llama(config: HfConfig) -> ModelFlags:
    """The flags of a ``LlamaForCausalLM``."""
    biases = config.get("attention_bias", False)
    config.require("mlp_bias", biases, "biases are in all linear layers or in none", default=False)
    return like_llama(config, add_bias_linear=biases)


def fields_like_llama(model: ModelConfig, architecture: str, **options: Any) -> dict[str, Any]:
    """The fields of a model's ``config.json`` that all families like Llama share.

    Args:
        **options: the family's own fields.
    """
    return {
        "architectures": [architecture],
        "attention_dropout": model.attention_dropout,
        "head_dim": model.kv_channels,
        "hidden_act": gate_field(model),
        "hidden_size": model.hidden_size,
        "initializer_range": model.init_method_std,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": positions_field(model),
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_query_groups,
        "rms_norm_eps": model.norm_epsilon,
        **rotary_fields(model),
        "tie_word_embeddings": model.tied,
        **options,
    }


def llama_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    biases = model.add_bias_linear
    return fields_like_llama(model, "LlamaForCausalLM", attention_bias=biases, mlp_bias=biases)


def _block(block: Block) -> Mapping[str, Mapping[str, Within]]:
    """Names for all families like Llama: each of them has some of these parameters."""
    return {
        "attention_norm": {"input_layernorm": WHOLE},
        "attention.qkv": {f"self_attn.{name}_proj": place for name, place in projections(block.attention).items()},
        "attention.query_norm": {"self_attn.q_norm": WHOLE},
        "attention.key_norm": {"self_attn.k_norm": WHOLE},
        "attention.out": {"self_attn.o_proj": WHOLE},
        "attention_post_norm": {"post_attention_layernorm": WHOLE},
        "mlp_norm": {"post_attention_layernorm": WHOLE},
        "mlp.up": {"mlp.gate_proj": part(0), "mlp.up_proj": part(1)},
        "mlp.down": {"mlp.down_proj": WHOLE},
        "mlp_post_norm": {"post_feedforward_layernorm": WHOLE},
        "mlp.router": {"mlp.gate": WHOLE},
        **(expert_names(block.mlp, "mlp") if isinstance(block.mlp, Experts) else {}),
    }


LLAMA_NAMES = WeightNames(
    base="model.",
    outer={"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"},
    blocks="layers",
    block=_block,
)
