"""The list of Hugging Face model families: from a ``config.json`` to a GPT's flags, and back.

Each family has a file of its own. It says which flags make a GPT compute the model of a ``config.json``, which
``config.json`` describes a GPT, and how transformers names and stores the weights. Every field that the computation
depends on is read. If its value cannot be reproduced, an error names it. Nothing here imports transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptpar.config import ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.sections.model import complete_model
from gptpar.config.sections.positions import SCALED_BY
from gptpar.errors import ConfigError
from gptpar.model.families.fields import HfConfig, rotary_layers, windows_of
from gptpar.model.families.gpt2 import GPT2_NAMES, gpt2, gpt2_fields
from gptpar.model.families.gpt_neox import GPT_NEOX_NAMES, gpt_neox, gpt_neox_fields
from gptpar.model.families.gpt_oss import GPT_OSS_MXFP4_NAMES, GPT_OSS_NAMES, gpt_oss, gpt_oss_fields
from gptpar.model.families.llama import LLAMA_NAMES, llama, llama_fields
from gptpar.model.families.mixtral import MIXTRAL_NAMES, mixtral, mixtral_fields
from gptpar.model.families.mixtures import blocks_of, layer_list
from gptpar.model.families.names import HfTensor, WeightNames, hf_tensors
from gptpar.model.families.olmo2 import olmo2, olmo2_fields
from gptpar.model.families.olmoe import olmoe, olmoe_fields
from gptpar.model.families.qwen2 import qwen2, qwen2_fields
from gptpar.model.families.qwen3 import qwen3, qwen3_fields
from gptpar.model.families.qwen3_moe import qwen3_moe, qwen3_moe_fields
from gptpar.model.families.smollm3 import smollm3, smollm3_fields


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        flags: a ``config.json`` -> flags.
        fields: a model -> its ``config.json`` in this family, without ``model_type`` and ``vocab_size``.
        names: names of its weights.
        packed_names: names of its weights if ``quantization_config`` says that some are in MXFP4; ``None``: none can
            be.
    """

    flags: Callable[[HfConfig], ModelFlags]
    fields: Callable[[ModelConfig], dict[str, Any]]
    names: WeightNames
    packed_names: WeightNames | None = None


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2, gpt2_fields, GPT2_NAMES),
    "gpt_neox": Family(gpt_neox, gpt_neox_fields, GPT_NEOX_NAMES),
    "llama": Family(llama, llama_fields, LLAMA_NAMES),
    "qwen2": Family(qwen2, qwen2_fields, LLAMA_NAMES),
    "qwen3": Family(qwen3, qwen3_fields, LLAMA_NAMES),
    "olmo2": Family(olmo2, olmo2_fields, LLAMA_NAMES),
    "smollm3": Family(smollm3, smollm3_fields, LLAMA_NAMES),
    "olmoe": Family(olmoe, olmoe_fields, LLAMA_NAMES),
    "qwen3_moe": Family(qwen3_moe, qwen3_moe_fields, LLAMA_NAMES),
    "mixtral": Family(mixtral, mixtral_fields, MIXTRAL_NAMES),
    "gpt_oss": Family(gpt_oss, gpt_oss_fields, GPT_OSS_NAMES, GPT_OSS_MXFP4_NAMES),
}
"""``model_type`` -> family."""

LACKING = {
    "deepseek_v2": "attention over latent keys and values (kv_lora_rank), and its rotary positions on a part of a head"
}
LACKING["deepseek_v3"] = f"{LACKING['deepseek_v2']}, and the prediction of several tokens"
"""``model_type`` of mixtures that are not known -> what gptpar lacks for them."""

TRAINING_ONLY = frozenset(
    {
        *("seq_length", "max_position_embeddings", "padded_vocab_size", "make_vocab_size_divisible_by"),
        *("pad_vocab_size_to", "softmax_vocab_size", "softmax_over_padding"),
        *("init_method_std", "attention_dropout", "hidden_dropout", "z_loss_weight"),
        *("window_size", "window_pattern", "rope_pattern", "mup_base_hidden_size", "mup_base_kv_channels"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        *("moe_expert_capacity_factor", "moe_token_drop_policy"),
    }
)
"""Fields of a model that do not change its logits, or that are compared in another form."""


def flags_of(hf_config: Mapping[str, Any]) -> ModelFlags:
    """The flags that describe a transformers model; every size of the model is set.

    The vocabulary is ``padded_vocab_size``, the rows of the model's embedding, and the sequence length is the largest
    number of positions. ``gptpar.config.complete_model`` turns the flags into a ``ModelConfig``.

    Args:
        hf_config: the contents of a ``config.json``, of transformers 4 or newer.

    Raises:
        ConfigError: with all reasons why gptpar cannot compute the same: the family is unknown, a number is missing,
            or gptpar lacks an option.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        lacking = f": gptpar lacks {LACKING[kind]}" if isinstance(kind, str) and kind in LACKING else ""
        raise ConfigError([f"model_type {kind!r} is not known{lacking}; gptpar knows {', '.join(FAMILIES)}."])
    config = HfConfig(hf_config)
    packed = config.get("quantization_config", {})
    if packed and not (FAMILIES[kind].packed_names and packed.get("quant_method") == "mxfp4"):
        config.problems.append(
            "quantization_config is set, and gptpar has no quantized weights but gpt-oss's in mxfp4: take the model "
            "without."
        )
    try:
        flags = FAMILIES[kind].flags(config)
    except KeyError as missing:
        config.problems.append(f"{missing.args[0]} is missing in the config.json: a {kind} model needs it.")
    if config.problems:
        raise ConfigError([f"{kind}: {problem}" for problem in dict.fromkeys(config.problems)])
    return flags


def config_of(model: ModelConfig, vocab_rows: int) -> dict[str, Any]:
    """The ``config.json`` of a GPT, in the first family whose models compute the same.

    Args:
        vocab_rows: rows of the vocabulary.

    Raises:
        ConfigError: no family does; with the differences from the nearest family.
    """
    different: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        fields_there = {"model_type": kind, **family.fields(model), "vocab_size": vocab_rows}
        try:
            there = complete_model(flags_of(fields_there), TokenizerConfig())
        except ConfigError:  # the family cannot even say it
            continue
        different[kind] = differences(model, there)
        if not different[kind]:
            return fields_there
    kind = min(different, key=lambda kind: len(different[kind]))
    raise ConfigError(
        [f"no model of transformers computes what this one does; the nearest family is {kind}.", *different[kind]]
    )


def differences(model: ModelConfig, there: ModelConfig) -> list[str]:
    """A sentence for each field in which two models compute differently; fields of training alone do not count."""
    mine, theirs = _computed(model), _computed(there)
    return [
        f"--{name.replace('_', '-')} is {mine[name]}, and there it is {theirs[name]}."
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]


def _computed(model: ModelConfig) -> dict[str, Any]:
    """The fields that a model's logits depend on, without those that other fields switch off."""
    found = {
        spec.name: getattr(model, spec.name) for spec in dataclasses.fields(model) if spec.name not in TRAINING_ONLY
    }
    rope, learned = (model.position_embedding_type == kind for kind in ("rope", "learned_absolute"))
    off = {
        "rotary_base": not rope,
        "rotary_percent": not rope,
        "rope_scaling_type": not rope,
        **{name: not rope or model.rope_scaling_type not in kinds for name, kinds in SCALED_BY.items()},
        "qk_layernorm_scope": not model.qk_layernorm,
        "mlp_activation": model.swiglu,
        "add_qkv_bias": model.add_bias_linear,
        "ffn_hidden_size": all(blocks_of(model)),
    }
    found = {name: value for name, value in found.items() if not off.get(name, False)}
    found["max_position_embeddings"] = model.max_position_embeddings if learned else None
    if rope:
        found["rope_pattern"] = "".join("NR"[has] for has in rotary_layers(model))
    if model.has_experts:
        found["moe_layer_freq"] = layer_list(blocks_of(model))
        found["moe_ffn_hidden_size"] = model.width_of_experts(model.ffn_hidden_size)
    return found | {"window_size": windows_of(model)}


def tensors_of(kind: str, model: ModelConfig, vocab_rows: int, *, packed: bool = False) -> list[HfTensor]:
    """The tensors of a model of a family, as transformers names and stores them.

    Args:
        packed: whether some are in MXFP4.
    """
    names = FAMILIES[kind].packed_names if packed else None
    return list(hf_tensors(model, names or FAMILIES[kind].names, vocab_rows))


__all__ = ["FAMILIES", "Family", "HfTensor", "config_of", "differences", "flags_of", "tensors_of"]
